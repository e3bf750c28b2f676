"""Runs the reporter: a unit of its own that publishes the agent's report over HTTP and to Kubernetes."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host
from pyinfra.operations import files

from tasks import agent, kubernetes
from tasks.common import archive
from tasks.common.commands import Commands
from tasks.common.data import Key
from tasks.common.facts import FactBase
from tasks.common.status import COMMAND

UNIT = kubernetes.UNIT
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
UNIT_TEMPLATE = archive.ROOT / "templates" / f"{UNIT}.j2"

CREDENTIALS_SINCE = 247
"""The first systemd with LoadCredential=. RHEL 8 and its rebuilds have 239."""

# A path becomes part of the unit's text, where white space, ':' and '%' are special.
_PATH = re.compile(r"/[\w./@+-]+")


def _address(value: object) -> str:
    host_part, _, port = str(value).rpartition(":")
    try:
        ipaddress.ip_address(host_part.removeprefix("[").removesuffix("]"))
        valid = isinstance(value, str) and 1 <= int(port) <= 65535
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{value!r} is not valid; give an IP address and a port, as '127.0.0.1:9809'")
    return str(value)


def _path(value: object) -> str | None:
    if not isinstance(value, str) or not _PATH.fullmatch(value):
        raise ValueError(f"{value!r} is not a valid path; give an absolute one of letters, digits and ./@+_-")
    return value


LISTEN = Key("reporter_listen", "127.0.0.1:9809", _address)
CERTIFICATE: Key[str | None] = Key("reporter_tls_cert", None, _path)
TLS_KEY: Key[str | None] = Key("reporter_tls_key", None, _path)
TOKEN: Key[str | None] = Key("reporter_token_file", None, _path)
KEYS = (LISTEN, CERTIFICATE, TLS_KEY, TOKEN)

# Each with its name as a systemd credential, and the reporter's option. systemd reads the files as root for the unit's user.
_CREDENTIALS = (
    (CERTIFICATE, "tls.crt", "--tls-cert"),
    (TLS_KEY, "tls.key", "--tls-key"),
    (TOKEN, "token", "--token-file"),
)


@frozen
class ReporterUnit:
    """How the reporter runs. ``credentials``: systemd's NAME:PATH; ``options``: the reporter's options for them.

    ``copied``: systemd does not support credentials, so the unit makes copies for its user. ``allowed``: the addresses for
    systemd's IP filter; None: no filter. ``publishes``: it publishes to Kubernetes, too.
    """

    listen: str
    allowed: str | None
    publishes: bool
    credentials: tuple[str, ...]
    copied: bool
    options: str


class SystemdVersion(FactBase[int | None]):
    """The version of the node's systemd; None: unknown."""

    def command(self) -> StringCommand:
        """Run `systemctl --version`."""
        return StringCommand("systemctl", "--version")

    def process(self, output: list[str]) -> int | None:
        """Parse a first line such as `systemd 239 (239-82.el8_10.2)`."""
        version = re.match(r"systemd (\d+)", output[0])
        return int(version[1]) if version else None


def _peers() -> str | None:
    """The API server's address for systemd's IP filter; None: it is given by name, which the filter does not support."""
    key = kubernetes.KUBERNETES.here()
    if key is None:
        return ""
    try:
        return f" {ipaddress.ip_address(urlsplit(key.server).hostname or '')}"
    except ValueError:
        return None


def settings() -> ReporterUnit:
    """The settings for the current host.

    :raises DeployError: they would be insecure; naming host, key and remedy.
    """
    listen = LISTEN.here()
    loopback = ipaddress.ip_address(listen.rpartition(":")[0].strip("[]")).is_loopback
    values = [(key.here(), name, option) for key, name, option in _CREDENTIALS]
    missing = [key.name for key, _, _ in _CREDENTIALS if key.here() is None]
    if missing and not loopback:
        raise DeployError(
            f"{host.name}.{LISTEN.name}: {listen} can be reached from other machines; give {', '.join(missing)}, too, "
            "or listen on 127.0.0.1"
        )
    if (CERTIFICATE.here() is None) != (TLS_KEY.here() is None):
        raise DeployError(f"{host.name}.{CERTIFICATE.name}: a certificate needs its key; give both or none")
    publishes = kubernetes.KUBERNETES.here() is not None
    values += [(kubernetes.SECRET, "kubernetes", "--kubernetes-secret")] if publishes else []
    peers = _peers()
    credentials = tuple(f"{name}:{path}" for path, name, _ in values if path)
    version = host.get_fact(SystemdVersion) if credentials else None
    return ReporterUnit(
        listen,
        f"localhost{peers}" if loopback and peers is not None else None,
        publishes,
        credentials,
        version is not None and version < CREDENTIALS_SINCE,
        (f" --kubernetes {kubernetes.SETTINGS}" if publishes else "")
        + "".join(f" {option} ${{CREDENTIALS_DIRECTORY}}/{name}" for path, name, option in values if path),
    )


@deploy("Reporter")
def serve(version: str) -> None:
    """Run the reporter of the current version."""
    wanted = settings()
    unit = files.template(
        name="Unit",
        src=str(UNIT_TEMPLATE),
        dest=UNIT_FILE,
        mode="644",
        command=COMMAND,
        listen=wanted.listen,
        allowed=wanted.allowed,
        publishes=wanted.publishes,
        credentials=wanted.credentials,
        copied=wanted.copied,
        options=wanted.options,
    )
    run(name="Service", version=version, unit=unit)


@operation()
def run(version: str, unit: OperationMeta) -> Commands:
    """Enable and start the service; restart it for another version or unit file."""
    yield from agent.serve(UNIT, version, unit)
