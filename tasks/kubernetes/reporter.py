"""Runs the reporter: a unit of its own that publishes the agent's report over HTTP and to Kubernetes."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host
from pyinfra.operations import files

from agent.reporter.http.address import Address, CannotServe
from tasks import agent, kubernetes
from tasks.common import archive, units
from tasks.common.commands import Commands
from tasks.common.data import Key
from tasks.common.facts import FactBase
from tasks.common.status import COMMAND

UNIT = kubernetes.UNIT
UNIT_FILE = f"{units.FOLDER}/{UNIT}"
UNIT_TEMPLATE = archive.ROOT / "templates" / f"{UNIT}.j2"

CREDENTIALS_SINCE = 247
"""The first systemd with LoadCredential=. RHEL 8 and its rebuilds have 239."""


def _address(value: object) -> str:
    try:
        port = Address.parse(str(value)).port
    except CannotServe as error:
        raise ValueError(str(error)) from None
    if port == 0:
        raise ValueError(f"{value!r} is not valid; give the port, as 127.0.0.1:9809")
    return str(value)


LISTEN = Key("reporter_listen", "127.0.0.1:9809", _address)


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


@deploy("Reporter")
def serve(version: str) -> None:
    """Run the reporter of the current version."""
    peers = _peers()
    publishes = kubernetes.KUBERNETES.here() is not None
    systemd = host.get_fact(SystemdVersion) if publishes else None
    unit = files.template(
        name="Unit",
        src=str(UNIT_TEMPLATE),
        dest=UNIT_FILE,
        mode="644",
        command=COMMAND,
        listen=LISTEN.here(),
        # For systemd's IP filter; None: no filter.
        allowed=None if peers is None else f"localhost{peers}",
        # systemd reads it as root for the unit's user. A systemd without credentials has the unit make a copy for its user.
        secret=kubernetes.SECRET if publishes else None,
        copied=systemd is not None and systemd < CREDENTIALS_SINCE,
        options=f" --kubernetes {kubernetes.SETTINGS} --kubernetes-secret ${{CREDENTIALS_DIRECTORY}}/kubernetes"
        if publishes
        else "",
    )
    run(name="Service", version=version, unit=unit)


@operation()
def run(version: str, unit: OperationMeta) -> Commands:
    """Enable and start the service; restart it for another version or unit file."""
    yield from agent.serve(UNIT, version, unit)
