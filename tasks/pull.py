"""Pull mode: a systemd timer on the node fetches the deploy as a signed archive, and runs it on the node itself.

`python -m tasks.pull` builds the archive on the control host: the deploy, the agent, and pyinfra with its libraries. The
operator signs it (docs/operating.md). The node has the public key, and verifies the archive before it unpacks it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from io import StringIO
from pathlib import Path

import click
from attrs import field, frozen
from attrs.validators import and_
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host
from pyinfra.operations import files

from agent.spec.validators import Matches, Within
from tasks.agent import AgentService
from tasks.common import archive, site, systemd_reload
from tasks.common.commands import Commands, changes, script, warn
from tasks.common.connection import deploys_itself
from tasks.common.data import Key, record, without_password
from tasks.common.texts import Present
from tasks.common.units import FOLDER
from tasks.packages import INTERPRETERS, NO_PYTHON

PROGRAM = "/usr/local/libexec/trackbed-pull"
SETTINGS = "/etc/trackbed/pull.json"
KEYRING = "/etc/trackbed/pull.gpg"
SERVICE = "trackbed-pull.service"
TIMER = "trackbed-pull.timer"
TEMPLATES = archive.ROOT / "templates"

CONTENT = (
    "agent",
    "cli",
    "config.py",
    "deploy.py",
    # The key `fabric` belongs to a task that needs it, and all keys are checked on every node.
    "fleet",
    "pyproject.toml",
    "requirements",
    "tasks",
    "templates",
)
OF_THE_SITE = ("inventories", "group_data", "*.py", "*/__init__.py")
"""What the archive has of a site: inventories, their data, and modules and packages that these import."""

NOT_COPIED = ("__pycache__", ".*")
"""Files that are no part of a folder. Editors keep locks (links to nothing) and copies of what is edited under hidden names."""

LOCAL = "inventories/local.py"
"""The node's own inventory in the archive; it reads the one that pull.inventory names."""

PINS = archive.ROOT / "requirements" / "pull.txt"
TARGETS = tuple(f"3.{minor}-{machine}" for minor in range(10, 15) for machine in archive.MACHINES)

PATHS = (f"{FOLDER}/{TIMER}", f"{FOLDER}/{SERVICE}", PROGRAM, SETTINGS, KEYRING)


@frozen
class Pull:
    """Where the archive is, and how often the node looks for it.

    ``url``: of the archive; its signature has the same URL with `.sig`. ``keyring``: a file on the control host with public
    keys (`gpg --export`), of which one must have signed the archive. ``inventory``: in the archive. ``every``: minutes.
    """

    url: str = field(
        validator=and_(
            without_password,
            Matches(re.compile(r"(https?|file)://[!-~]+"), "give a URL: https://, http:// or file://"),
        )
    )
    keyring: str = field(validator=Matches(re.compile(r"[^\n]+"), "give a file's path"))
    inventory: str = field(
        validator=Matches(re.compile(r"inventories/[\w.-]+\.py"), "give it as inventories/prod.py, as in the archive")
    )
    every: int = field(default=60, validator=Within(5, 10080, "minutes"))


PULL: Key[Pull | None] = Key("pull", None, record(Pull))


@deploy("Pull")
def serve() -> None:
    """Install the timer; without the key, remove it.

    :raises DeployError: the keyring is not a file of public keys.
    """
    wanted = PULL.here()
    if wanted is None:
        remove(name="No timer")
        return
    # A node that deploys itself keeps its keyring and its name: an archive must not change whose signature is trusted.
    itself = deploys_itself(host)
    keyring = Path(KEYRING) if itself else site.path(wanted.keyring)
    name = json.loads(Path(SETTINGS).read_text())["host"] if itself else host.name
    if not keyring.is_file() or not _is_keyring(keyring.read_bytes()):
        raise DeployError(
            f"{host.name}.pull.keyring: {keyring} is not a file of public keys; make it by "
            f"`gpg --export KEY > {wanted.keyring}`"
        )
    if not host.state.is_executing and not site.path(wanted.inventory).is_file():
        warn(host, f"pull.inventory: {wanted.inventory} is not a file of the site; does the archive have it?")
    settings = {"url": wanted.url, "inventory": wanted.inventory, "host": name}
    written = [
        files.put(name="Public keys", src=str(keyring), dest=KEYRING, mode="644"),
        files.put(name="Settings", src=StringIO(json.dumps(settings, indent=2) + "\n"), dest=SETTINGS, mode="644"),
        files.put(name="Program", src=str(TEMPLATES / "pull.py"), dest=PROGRAM, mode="644"),
        files.template(
            name="Service",
            src=str(TEMPLATES / f"{SERVICE}.j2"),
            dest=f"{FOLDER}/{SERVICE}",
            mode="644",
            interpreters=" ".join(INTERPRETERS),
            no_python=NO_PYTHON,
            program=PROGRAM,
        ),
        files.template(
            name="Timer", src=str(TEMPLATES / f"{TIMER}.j2"), dest=f"{FOLDER}/{TIMER}", every=wanted.every, mode="644"
        ),
    ]
    run(name="Timer runs", units=tuple(written[-2:]))


def _is_keyring(content: bytes) -> bool:
    # RFC 9580: bit 7 of a packet's first byte is set. A public key has type 6, in bits 5-2 (old format) or 5-0 (new format).
    first = content[0] if content else 0
    return bool(first & 0x80) and ((first & 0x3F) == 6 if first & 0x40 else (first & 0x3C) >> 2 == 6)


@operation()
def run(units: tuple[OperationMeta, ...]) -> Commands:
    """Enable and start the timer; restart it if a unit has changed."""
    timer = host.get_fact(AgentService, unit=TIMER, since="ActiveEnterTimestamp")
    if timer.active and timer.enabled and not timer.stale and not any(map(changes, units)):
        host.noop("the timer runs")
    elif not systemd_reload.deferred("the timer of pull mode"):
        yield script(systemd_reload.RELOAD)
        yield StringCommand("systemctl", "enable", TIMER)
        yield StringCommand("systemctl", "restart", TIMER)


# The service is not stopped: a run in progress, which may be this one, must complete.
_REMOVE = f"""{systemd_reload.LINKS}
timer=$1; shift
systemctl disable --now --quiet "$timer" || true
rm -f -- "$@"
{systemd_reload.RELOAD}"""


@operation()
def remove() -> Commands:
    """Stop the timer and delete its files."""
    if not host.get_fact(Present, paths=PATHS):
        host.noop("the node has no timer")
    elif not systemd_reload.deferred("no timer of pull mode"):
        yield script(_REMOVE, TIMER, *PATHS)


def _issued() -> int:
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if not given:
        return int(time.time())
    if not re.fullmatch("[0-9]{1,15}", given):
        raise DeployError(f"SOURCE_DATE_EPOCH={given!r} is not a number of seconds since 1970")
    return int(given)


def build(output: Path, targets: tuple[str, ...], of_site: Path) -> None:
    """Build the archive. In it, the site's files are where this checkout has its examples.

    :param targets: the nodes' Python versions and machines (`uname -m`), as `3.11-x86_64`.
    :param of_site: the folder with the inventories and their data.
    :raises DeployError: pip failed; with its message. Or the site is for another version, or has no inventories.
    """
    if fault := site.fault(of_site):
        raise DeployError(fault)
    if not (of_site / "inventories").is_dir():
        raise DeployError(f"{of_site} has no folder inventories; give the site that `trackbed init` has made")
    if (of_site / LOCAL).exists() and of_site.resolve() != archive.ROOT:
        raise DeployError(f"{of_site / LOCAL}: the archive has another file of this name; rename yours")
    with tempfile.TemporaryDirectory(prefix="trackbed-pull-") as folder:
        tree = Path(folder)
        pins = tree / "pins.txt"
        for path in _of_the_site(of_site):
            _copy(path, tree)
        for name in (*CONTENT, LOCAL):
            _copy(archive.ROOT / name, tree / Path(name).parent)
        # A node refuses an archive that is older than the last one it deployed. With SOURCE_DATE_EPOCH
        # (reproducible-builds.org) the same commit makes the same bytes.
        (tree / "ISSUED").write_text(f"{_issued()}\n")
        (tree / "cache" / "trackbed").mkdir(parents=True)
        for target in targets:
            python, _, machine = target.partition("-")
            pins.write_text(archive.pins(PINS, machine, python))
            abis = (f"cp{python.replace('.', '')}", "abi3", "none")
            archive.install_wheels(f"pyinfra for {target}", pins, tree / f"lib-{target}", machine, python, abis)
            agent = archive.build(machine)
            shutil.copyfile(agent, tree / "cache" / "trackbed" / agent.name)
        pins.unlink(missing_ok=True)
        new = output.with_name(f"{output.name}.new")
        archive.pack(tree, new)
        new.replace(output)


def _of_the_site(of_site: Path) -> list[Path]:
    found = {path for pattern in OF_THE_SITE for path in of_site.glob(pattern)}
    found = {path.parent if path.name == "__init__.py" else path for path in found}
    if of_site.resolve() == archive.ROOT:
        found = {path for path in found if path.name in OF_THE_SITE}
    return sorted(path for path in found if path.name not in CONTENT and not path.name.startswith("."))


def _copy(path: Path, folder: Path) -> None:
    """Copy a file or a folder into a folder, in the place of what has its name.

    :raises DeployError: a file cannot be read.
    """
    try:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns(*NOT_COPIED))
        else:
            shutil.copyfile(path, folder / path.name)
    except shutil.Error as error:
        # Of each file of the folder: its path, that of the copy, and the reason.
        file, _, reason = error.args[0][0]
        raise DeployError(f"{file} cannot be packed: {reason}; remove or mend that file") from None


@click.command()
@click.argument("of_site", metavar="SITE", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--for", "targets", multiple=True, required=True, type=click.Choice(TARGETS), help="Nodes' Python and machine."
)
def main(of_site: Path, output: Path, targets: tuple[str, ...]) -> None:
    """Build the archive of pull mode for the nodes of SITE and write it to OUTPUT. Sign it with `gpg --detach-sign OUTPUT`."""
    try:
        build(output, targets, of_site)
    except (DeployError, OSError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
