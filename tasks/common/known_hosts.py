"""The host keys that are known: a host's key is judged as OpenSSH judges it, by the same files (sshd(8), hostfile.c).

pyinfra reads only the user's files. paramiko reads them without patterns and markers, takes one key of each type for a host,
and fails each host if it meets a hashed name or a byte that it cannot read.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import cache, wraps
from pathlib import Path
from typing import Any

from attrs import frozen
from paramiko import HostKeys, MissingHostKeyPolicy, PKey, Transport
from paramiko.hostkeys import HostKeyEntry
from pyinfra import logger
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.sshuserclient.client import AcceptNewPolicy, StrictPolicy, get_ssh_config

GLOBAL = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
"""The files of all users, unless the SSH configuration names others (`GlobalKnownHostsFile`)."""

NONE = "none"
"""Stands for no file in the SSH configuration."""

NO_NAME = frozenset("*?!,|")
"""What makes a line's hosts other than one name. Most lines of a large fleet have none of it."""

KEY, REVOKED, AUTHORITY = "", "@revoked", "@cert-authority"
"""The markers of lines."""


@frozen
class Line:
    """A line of a file: a key, and the hosts that it is for, as patterns with commas between them, or one hashed name."""

    place: str
    marker: str
    hosts: str
    key: PKey

    def fits(self, name: str) -> bool:
        """Whether it is for a host, by its name in lower case, or `[name]:port`."""
        if NO_NAME.isdisjoint(self.hosts):
            return self.hosts == name
        if self.hosts.startswith("|"):
            return HostKeys.hash_host(name, self.hosts) == self.hosts
        fitting = [each for each in self.hosts.split(",") if _matches(each.removeprefix("!"), name)]
        return bool(fitting) and not any(each.startswith("!") for each in fitting)


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or (("*" in pattern or "?" in pattern) and fnmatchcase(name, pattern.replace("[", "[[]")))


def _line(text: str, place: str) -> Line | None:
    """None: a comment, or a line that OpenSSH leaves out, too."""
    marker, *fields = text.split() if text.lstrip().startswith("@") else ["", *text.split()]
    hosts = fields[0] if fields else "#"
    if hosts.startswith("#") or marker not in (KEY, REVOKED, AUTHORITY):
        return None
    try:
        entry = HostKeyEntry.from_line(" ".join(fields[:3]))
        if hosts.startswith("|"):
            HostKeys.hash_host("", hosts)
    # What paramiko raises for a damaged key or name has no type in common.
    except Exception:
        return None
    return Line(place, marker, hosts if hosts.startswith("|") else hosts.lower(), entry.key) if entry else None


@cache
def lines(file: str) -> list[Line]:
    """What a file knows. Keys that are noted are added."""
    if file == NONE:
        return []
    try:
        text = Path(file).read_text(errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning(f"the host keys in {file} are not read: {error.strerror}")
        return []
    read = (_line(line, f"line {number} of {file}") for number, line in enumerate(text.split("\n"), 1))
    return [line for line in read if line]


@frozen
class KnownHosts:
    """The lines of several files. It stands in for paramiko's HostKeys, which tells paramiko nothing: :class:`Judge` does."""

    files: tuple[str, ...]

    def get(self, name: str) -> None:
        """No key, so that paramiko asks its policy about each."""

    def of(self, name: str) -> list[Line]:
        """The lines for a host."""
        return [line for file in self.files for line in lines(file) if line.fits(name.lower())]


def reading(_: object) -> Callable[[Iterable[str]], KnownHosts]:
    """get_host_keys: the user's files are read by :func:`lines`."""
    return lambda files: KnownHosts(tuple(files))


def configured(host: str, config_file: str | None) -> tuple[tuple[str, ...], str | None]:
    """The files of all users, and the name that a host has in files of keys (`HostKeyAlias`), by the SSH configuration."""
    config = get_ssh_config(config_file)
    of_host = config.lookup(host) if config else {}
    files = of_host.get("globalknownhostsfile", GLOBAL).split()
    return tuple(map(os.path.expanduser, files)), of_host.get("hostkeyalias")


@frozen
class Judge(MissingHostKeyPolicy):
    """Refuses a key that is revoked or that is not the host's, before a password is sent.

    ``name``: the host's in files of keys. ``by_name``: what is known of it without a port. OpenSSH accepts such a key at any.
    """

    name: str
    new: MissingHostKeyPolicy
    known: list[Line]
    by_name: list[Line]

    def missing_host_key(self, client: Any, hostname: str, key: PKey) -> None:
        """paramiko calls it with each host's key: :class:`KnownHosts`."""
        if line := _first([*self.known, *self.by_name], REVOKED, key):
            raise ConnectError(f"{line.place} revokes the key of {self.name}: let the host have a new key")
        if _first(self.known, KEY, key):
            return
        if others := [line for line in self.known if line.marker == KEY]:
            other = next((line for line in others if line.key.get_name() == key.get_name()), others[0])
            raise ConnectError(
                f"{self.name} has another key than {other.place} says: if the host has a new key, correct that line; if not, "
                "another machine answers for it"
            )
        if _first(self.by_name, KEY, key):
            return
        authority = next((line for line in self.known if line.marker == AUTHORITY), None)
        if authority and isinstance(self.new, AcceptNewPolicy | StrictPolicy):
            raise ConnectError(
                f"{authority.place} has the host's certificate vouch for {self.name}, and pyinfra reads none: note the host's "
                "key, too"
            )
        self.new.missing_host_key(client, self.name, key)


def _first(known: Iterable[Line], marker: str, key: PKey) -> Line | None:
    return next((line for line in known if line.marker == marker and line.key == key), None)


def judging(connect: Callable[..., None]) -> Callable[..., None]:
    """paramiko's SSHClient.connect: :class:`Judge` decides about the host's key. A key that is known is asked for first."""

    @wraps(connect)
    def connect_judged(self: Any, hostname: str, port: int | str = 22, *more: Any, **given: Any) -> None:
        if not isinstance(self._host_keys, KnownHosts):
            # A client that is not pyinfra's.
            connect(self, hostname, int(port), *more, **given)
            return
        global_files, alias = self._configured
        hosts = KnownHosts((*self._host_keys.files, *global_files))
        name = alias or (hostname if int(port) == 22 else f"[{hostname}]:{port}")
        by_name, known = hosts.of(alias or hostname), hosts.of(name)
        names = {line.key.get_name() for line in known if line.marker == KEY}
        make = given.get("transport_factory") or Transport

        def preferring(sock: Any, **settings: Any) -> Transport:
            transport = make(sock, **settings)
            options = transport.get_security_options()
            # An algorithm of an RSA key does not have the key's name (RFC 8332).
            options.key_types = sorted(
                options.key_types, key=lambda kind: ("ssh-rsa" if kind.startswith("rsa-") else kind) not in names
            )
            return transport

        self._policy = Judge(name, self._policy, known, by_name)
        try:
            connect(self, hostname, int(port), *more, **{**given, "transport_factory": preferring})
        except Exception:
            self.close()
            raise

    return connect_judged


def noting(append: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
    """append_hostkey: a first connection makes the folder of known_hosts, and succeeds if the key cannot be written.

    Both as ssh(1) has it. pyinfra's function expects the folder, which a new user's home does not have, and writes the key of
    a bastion once for each host behind it.
    """

    @wraps(append)
    def append_or_warn(connection: Any, hostname: str, key: Any) -> None:
        file = connection._host_keys_filename or NONE
        if _first(connection._host_keys.of(hostname), KEY, key):
            return
        lines(file).append(Line(file, KEY, hostname.lower(), key))
        if file == NONE:
            return
        try:
            Path(file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            append(connection, hostname, key)
        except OSError as error:
            logger.warning(f"{hostname}: its host key is not noted in {file}: {error.strerror}")

    return append_or_warn
