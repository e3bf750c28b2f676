"""The reporter: it says over HTTP what the agent reports, from a process and a unit of its own."""

from __future__ import annotations

import ipaddress
import re

from attrs import frozen
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host
from pyinfra.operations import files

from tasks import agent, archive
from tasks.commands import Commands
from tasks.data import Key
from tasks.status import COMMAND

UNIT = "trackbed-reporter.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
UNIT_TEMPLATE = archive.ROOT / "templates" / f"{UNIT}.j2"

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
    """How the reporter serves. ``credentials``: systemd's NAME:PATH; ``options``: what the command is given of them."""

    listen: str
    loopback: bool
    credentials: tuple[str, ...]
    options: str


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
    return Settings(
        listen,
        loopback,
        tuple(f"{name}:{path}" for path, name, _ in given if path),
        "".join(f" {option} ${{CREDENTIALS_DIRECTORY}}/{name}" for path, name, option in given if path),
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
        loopback=wanted.loopback,
        credentials=wanted.credentials,
        options=wanted.options,
    )
    run(name="Service", version=version, unit=unit)


@operation()
def run(version: str, unit: OperationMeta) -> Commands:
    """Enable the service; start it, or restart it for another version or unit."""
    yield from agent.serve(UNIT, version, unit)
