"""The reporter: it says over HTTP, and to Kubernetes, what the agent reports, from a process and a unit of its own."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host
from pyinfra.operations import files

from tasks import agent, kubernetes
from tasks.common import archive
from tasks.common.commands import Commands
from tasks.common.data import Key
from tasks.common.status import COMMAND

UNIT = "trackbed-reporter.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
UNIT_TEMPLATE = archive.ROOT / "templates" / f"{UNIT}.j2"

CREDENTIALS_SINCE = 247
"""The systemd that came with LoadCredential=. RHEL 8 and what is made of it have 239."""

# Of a file on the node; it becomes a part of the unit's text, where white space, ':' and '%' mean something.
_PATH = re.compile(r"/[\w./@+-]+")


def _address(value: object) -> str:
    host_part, _, port = str(value).rpartition(":")
    try:
        ipaddress.ip_address(host_part.removeprefix("[").removesuffix("]"))
        valid = isinstance(value, str) and 1 <= int(port) <= 65535
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{value!r} is no address; give an IP address and a port, as '127.0.0.1:9809'")
    return str(value)


def _path(value: object) -> str | None:
    if not isinstance(value, str) or not _PATH.fullmatch(value):
        raise ValueError(f"{value!r} is no file's path; give one that begins with '/', of letters, digits and ./@+_-")
    return value


LISTEN = Key("reporter_listen", "127.0.0.1:9809", _address)
CERTIFICATE: Key[str | None] = Key("reporter_tls_cert", None, _path)
TLS_KEY: Key[str | None] = Key("reporter_tls_key", None, _path)
TOKEN: Key[str | None] = Key("reporter_token_file", None, _path)
KEYS = (LISTEN, CERTIFICATE, TLS_KEY, TOKEN)

# systemd's name for each, and the reporter's option: it reads them as root, and hands them to the unit's own user.
_CREDENTIALS = (
    (CERTIFICATE, "tls.crt", "--tls-cert"),
    (TLS_KEY, "tls.key", "--tls-key"),
    (TOKEN, "token", "--token-file"),
)


@frozen
class Settings:
    """How the reporter serves. ``credentials``: systemd's NAME:PATH; ``options``: what the command is given of them.

    ``copied``: its systemd knows no credentials, so the unit has copies made for its user. ``allowed``: addresses that it
    talks to, as systemd's filter has them; None: any. ``publishes``: to Kubernetes, too.
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
        """Ask systemctl."""
        return StringCommand("systemctl", "--version")

    def process(self, output: list[str]) -> int | None:
        """A first line such as `systemd 239 (239-82.el8_10.2)`."""
        found = re.match(r"systemd (\d+)", output[0])
        return int(found[1]) if found else None


def _peers() -> str | None:
    """Who may be talked to beside this machine, for systemd's filter; None: a server's name, which the filter cannot take."""
    key = kubernetes.KUBERNETES.here()
    if key is None:
        return ""
    try:
        return f" {ipaddress.ip_address(urlsplit(key.server).hostname or '')}"
    except ValueError:
        return None


def settings() -> Settings:
    """The settings of the host at hand.

    :raises DeployError: they would be unsafe; naming host, key and remedy.
    """
    listen = LISTEN.here()
    loopback = ipaddress.ip_address(listen.rpartition(":")[0].strip("[]")).is_loopback
    given = [(key.here(), name, option) for key, name, option in _CREDENTIALS]
    lacking = [key.name for key, _, _ in _CREDENTIALS if key.here() is None]
    if lacking and not loopback:
        raise DeployError(
            f"{host.name}.{LISTEN.name}: {listen} can be reached from elsewhere; give {', '.join(lacking)}, too, "
            "or listen on 127.0.0.1"
        )
    if (CERTIFICATE.here() is None) != (TLS_KEY.here() is None):
        raise DeployError(f"{host.name}.{CERTIFICATE.name}: a certificate and its key belong together; give both")
    publishes = kubernetes.KUBERNETES.here() is not None
    given += [(kubernetes.SECRET, "kubernetes", "--kubernetes-secret")] if publishes else []
    peers = _peers()
    credentials = tuple(f"{name}:{path}" for path, name, _ in given if path)
    version = host.get_fact(SystemdVersion) if credentials else None
    return Settings(
        listen,
        f"localhost{peers}" if loopback and peers is not None else None,
        publishes,
        credentials,
        version is not None and version < CREDENTIALS_SINCE,
        (f" --kubernetes {kubernetes.SETTINGS}" if publishes else "")
        + "".join(f" {option} ${{CREDENTIALS_DIRECTORY}}/{name}" for path, name, option in given if path),
    )


@deploy("Reporter")
def serve(version: str) -> None:
    """Run the reporter of the version that is current."""
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
    """Enable the service; start it, or restart it for another version or unit."""
    yield from agent.serve(UNIT, version, unit)
