"""Pull mode: the node fetches this very deploy as a signed archive, and runs it on itself, by a timer of systemd.

The archive is made by `python -m tasks.pull_archive` and signed by the operator (docs/operating.md); the node has the public
key, and unpacks nothing that it does not verify.
"""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

from attrs import field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.connectors.local import LocalConnector
from pyinfra.context import host
from pyinfra.operations import files

from agent.spec.validators import Matches, Within
from tasks.common import archive
from tasks.common.commands import Commands, script
from tasks.common.data import Key, record
from tasks.packages import INTERPRETERS

PROGRAM = "/usr/local/libexec/trackbed-pull"
SETTINGS = "/etc/trackbed/pull.json"
KEYRING = "/etc/trackbed/pull.gpg"
SERVICE = "trackbed-pull.service"
TIMER = "trackbed-pull.timer"
UNITS = "/etc/systemd/system"
TEMPLATES = archive.ROOT / "templates"

PATHS = (f"{UNITS}/{TIMER}", f"{UNITS}/{SERVICE}", PROGRAM, SETTINGS, KEYRING)


@frozen
class Pull:
    """Where the archive is, and how often it is looked for.

    ``url``: of the archive; its signature is beside it, with `.sig` after the name. ``keyring``: a file on the control host,
    the public keys of which one must have signed (`gpg --export`). ``inventory``: in the archive. ``every``: minutes.
    """

    url: str = field(
        validator=Matches(re.compile(r"(https?|file)://[!-~]+"), "give a URL: https://, http:// or file://")
    )
    keyring: str = field(validator=Matches(re.compile(r"[^\n]+"), "give a file's path"))
    inventory: str = field(
        validator=Matches(re.compile(r"inventories/[\w.-]+\.py"), "give it as inventories/prod.py, as in the archive")
    )
    every: int = field(default=60, validator=Within(5, 10080, "minutes"))


PULL: Key[Pull | None] = Key("pull", None, record(Pull))
KEYS = (PULL,)


@deploy("Pull")
def serve() -> None:
    """Have the timer as the inventory says; without the key there is none.

    :raises DeployError: the keyring is no file of public keys.
    """
    wanted = PULL.here()
    if wanted is None:
        remove(name="No timer")
        return
    # Deploying itself, the node has both from its control host: an archive does not change whom it is believed from.
    itself = isinstance(host.connector, LocalConnector)
    keyring = Path(KEYRING) if itself else archive.ROOT / wanted.keyring
    name = json.loads(Path(SETTINGS).read_text())["host"] if itself else host.name
    if not keyring.is_file() or not _is_keyring(keyring.read_bytes()):
        raise DeployError(
            f"{host.name}.pull.keyring: {keyring} is no file of public keys; make it by `gpg --export KEY > {wanted.keyring}`"
        )
    settings = {"url": wanted.url, "inventory": wanted.inventory, "host": name}
    written = [
        files.put(name="Public keys", src=str(keyring), dest=KEYRING, mode="644"),
        files.put(name="Settings", src=StringIO(json.dumps(settings, indent=2) + "\n"), dest=SETTINGS, mode="644"),
        files.put(name="Program", src=str(TEMPLATES / "pull.py"), dest=PROGRAM, mode="644"),
        files.template(
            name="Service",
            src=str(TEMPLATES / f"{SERVICE}.j2"),
            dest=f"{UNITS}/{SERVICE}",
            mode="644",
            interpreters=" ".join(INTERPRETERS),
            program=PROGRAM,
        ),
        files.template(
            name="Timer", src=str(TEMPLATES / f"{TIMER}.j2"), dest=f"{UNITS}/{TIMER}", every=wanted.every, mode="644"
        ),
    ]
    run(name="Timer runs", units=tuple(written[-2:]))


def _is_keyring(content: bytes) -> bool:
    # RFC 9580: a packet has bit 7 set; a public key is of type 6, in the old format (bits 5-2) or the new one (bits 5-0).
    first = content[0] if content else 0
    return bool(first & 0x80) and ((first & 0x3F) == 6 if first & 0x40 else (first & 0x3C) >> 2 == 6)


class TimerState(FactBase[dict[str, str]]):
    """What systemd says of the timer."""

    default = dict

    def command(self) -> StringCommand:
        """`systemctl show`."""
        return StringCommand("systemctl", "show", "--property=ActiveState,UnitFileState,NeedDaemonReload", TIMER)

    def process(self, output: list[str]) -> dict[str, str]:
        """Lines of NAME=VALUE."""
        return dict(line.split("=", 1) for line in output if "=" in line)


@operation()
def run(units: tuple[OperationMeta, ...]) -> Commands:
    """Enable and start the timer, again if one of the units has changed."""
    state = host.get_fact(TimerState)
    changes = any(unit.did_change() if unit.is_complete() else unit.will_change for unit in units)
    if changes or state.get("NeedDaemonReload") == "yes":
        yield StringCommand("systemctl", "daemon-reload")
        yield StringCommand("systemctl", "enable", TIMER)
        yield StringCommand("systemctl", "restart", TIMER)
    elif (state.get("ActiveState"), state.get("UnitFileState")) != ("active", "enabled"):
        yield StringCommand("systemctl", "enable", "--now", TIMER)
    else:
        host.noop("the timer runs")


class Present(FactBase[list[str]]):
    """Those of our files that are on the node."""

    default = list

    def command(self) -> StringCommand:
        """Look at each."""
        return script('for path; do if [ -e "$path" ]; then echo "$path"; fi; done', *PATHS)

    def process(self, output: list[str]) -> list[str]:
        """One path a line."""
        return output


# A run that is under way, perhaps this one, ends by itself.
_REMOVE = """
timer=$1; shift
systemctl disable --now --quiet "$timer" || true
rm -f -- "$@"
systemctl daemon-reload
"""


@operation()
def remove() -> Commands:
    """Stop the timer and delete its files."""
    if host.get_fact(Present):
        yield script(_REMOVE, TIMER, *PATHS)
    else:
        host.noop("there is no timer")
