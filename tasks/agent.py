"""The agent on the node: staged first, so that the spec can be planned with it, and activated later.

/opt/trackbed/versions/VERSION  one folder a version, never changed after it appeared
/opt/trackbed/current           the version that the unit and the command `trackbed` run
/opt/trackbed/previous          what was current before
"""

from __future__ import annotations

from collections.abc import Generator
from io import StringIO

from attrs import frozen
from pyinfra.api.command import FileUploadCommand, PyinfraCommand, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host
from pyinfra.facts.server import Arch
from pyinfra.operations import files

from tasks import gate
from tasks.common import archive
from tasks.common.commands import Commands, refuse, script
from tasks.common.status import COMMAND, SPEC, VERIFIED, NodeStatus
from tasks.packages import INTERPRETERS, NodePython

BASE = "/opt/trackbed"
UNIT = "trackbed.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
TRIAL = "trackbed-upgrade.service"
UNIT_TEMPLATE = archive.ROOT / "templates" / f"{UNIT}.j2"

NO_PYTHON = f"there is no Python 3.10 or newer ({' or '.join(INTERPRETERS)}); install one, or use a later release"


def folder(version: str) -> str:
    """Where a version lies on the node."""
    return f"{BASE}/versions/{version}"


@frozen
class Versions:
    """What the node has of the agent."""

    current: str | None = None
    previous: str | None = None
    staged: frozenset[str] = frozenset()


_VERSIONS = """
cd "$1" 2>/dev/null || exit 0
for link in current previous; do
  if [ -e "$link" ]; then echo "$link $(basename "$(readlink "$link")")"; fi
done
for version in versions/*; do
  if [ -d "$version" ]; then echo "staged $(basename "$version")"; fi
done
"""


class AgentVersions(FactBase[Versions]):
    """The versions of the agent that the node has."""

    default = Versions

    def command(self) -> StringCommand:
        """The links, and the folders."""
        return script(_VERSIONS, BASE)

    def process(self, output: list[str]) -> Versions:
        """Lines such as `current 0.1.0-0123456789ab`."""
        found = [line.split(" ", 1) for line in output]
        links = {what: version for what, version in found if what != "staged"}
        staged = frozenset(version for what, version in found if what == "staged")
        return Versions(links.get("current"), links.get("previous"), staged)


@frozen
class Service:
    """The unit's state. ``version`` is what its main process runs; ``stale``: systemd has not read the file's changes."""

    active: bool = False
    enabled: bool = False
    stale: bool = False
    version: str | None = None


_SERVICE = """
systemctl show --property=ActiveState,UnitFileState,NeedDaemonReload "$1"
pid=$(systemctl show --property=MainPID --value "$1")
if [ -r "/proc/$pid/cmdline" ]; then echo "Command=$(tr '\\0' ' ' < "/proc/$pid/cmdline" || true)"; fi
"""


class AgentService(FactBase[Service]):
    """The state of a unit that runs the agent's archive."""

    default = Service

    def command(self, unit: str) -> StringCommand:
        """What systemd says, and the main process's command line: it names the version that runs."""
        return script(_SERVICE, unit)

    def process(self, output: list[str]) -> Service:
        """Lines of NAME=VALUE."""
        found = dict(line.split("=", 1) for line in output if "=" in line)
        running = [word for word in found.get("Command", "").split() if word.startswith(f"{BASE}/versions/")]
        return Service(
            active=found.get("ActiveState") in ("active", "reloading"),
            enabled=found.get("UnitFileState") == "enabled",
            stale=found.get("NeedDaemonReload") == "yes",
            version=running[0].rpartition("/")[2] if running else None,
        )


def release() -> str:
    """The version that this checkout gives the node."""
    return archive.version(host.get_fact(Arch))


@deploy("Agent")
def stage(version: str) -> None:
    """Bring the version to the node, beside the one that runs."""
    if version not in host.get_fact(AgentVersions).staged:
        # Now, so that a library that cannot be fetched stops the run before any node is touched.
        archive.build(host.get_fact(Arch))
    unpack(name="Stage", version=version)


# The folder appears complete, flushed and under its name in one step: nobody sees, and no power cut leaves, half of it.
_UNPACK = """
archive=$1 versions=$2 version=$3 python=$4
find "$versions" -mindepth 1 -maxdepth 1 -name '.new.*' -mmin +60 -exec rm -rf {} +
new=$(mktemp -d "$versions/.new.XXXXXX")
trap 'rm -rf "$new" "$archive"' EXIT
tar -xzf "$archive" -C "$new" --no-same-owner
chmod 755 "$new"
"$python" -I -m compileall -q --invalidation-mode unchecked-hash -s "$new" -p "$versions/$version" "$new"
sync -f "$new"
mv -T "$new" "$versions/$version" || test -d "$versions/$version"
"""


@operation()
def unpack(version: str) -> Commands:
    """Upload and unpack the version if the node does not have it."""
    if version in host.get_fact(AgentVersions).staged:
        host.noop(f"agent {version} is on the node")
        return
    uploaded = f"{BASE}/{version}.tar.gz"
    yield script('mkdir -p "$1"', f"{BASE}/versions")
    python = host.get_fact(NodePython)
    if python is None:
        yield refuse(NO_PYTHON)
        return
    yield FileUploadCommand(
        str(archive.build(host.get_fact(Arch))), uploaded, remote_temp_filename=host.get_temp_filename(uploaded)
    )
    yield script(_UNPACK, uploaded, f"{BASE}/versions", version, python)


@deploy("Agent")
def activate(version: str, spec_hash: str) -> None:
    """Make the staged version the one that runs, as a service, and let it take the spec with this hash."""
    switch(name="Switch", version=version)
    launcher(name="Command")
    unit = files.template(name="Unit", src=str(UNIT_TEMPLATE), dest=UNIT_FILE, mode="644", command=COMMAND)
    run(name="Service", version=version, spec_hash=spec_hash, unit=unit, patience=gate.TIMEOUT.here())


_SWITCH = """
cd "$1"
turn() { ln -sfn "$1" ".$2.new"; mv -T ".$2.new" "$2"; }
was=$(readlink current || true)
if [ -n "$was" ] && [ "$was" != "versions/$2" ]; then turn "$was" previous; fi
turn "versions/$2" current
previous=$(readlink previous || true)
for version in versions/*; do
  case "$version" in "versions/$2"|"$previous") ;; *) rm -rf "$version" ;; esac
done
"""


@operation()
def switch(version: str) -> Commands:
    """Point current at the version, previous at what was current; remove all others."""
    have = host.get_fact(AgentVersions)
    if have.current == version and have.staged <= {have.current, have.previous}:
        host.noop(f"agent {version} is current")
        return
    yield script(_SWITCH, BASE, version)


@operation()
def launcher() -> Commands:
    """Write the command `trackbed`.

    It resolves the link, so that a running agent does not import half of itself from the next version.
    """
    python = host.get_fact(NodePython) or INTERPRETERS[0]
    text = f'#!/bin/sh\nexec {python} -I "$(readlink -f {BASE}/current)" "$@"\n'
    yield from files.put._inner(src=StringIO(text), dest=COMMAND, mode="755")


# Why it does not start is in its own words.
_CONTROL = """
systemctl "$1" "$2" || { code=$?; journalctl --unit="$2" --lines=20 --output=cat --no-pager; exit "$code"; }
"""


def serve(
    name: str, version: str, unit: OperationMeta, restart: StringCommand | None = None
) -> Generator[PyinfraCommand, None, bool]:
    """Enable the unit called ``name``; start it, or restart it for another version, or for changes of its file.

    :param restart: how to restart it for another version.
    :returns: whether it was started or restarted.
    """
    have = host.get_fact(AgentService, unit=name)
    unit_changes = have.stale or (unit.did_change() if unit.is_complete() else unit.will_change)
    if unit_changes:
        yield StringCommand("systemctl", "daemon-reload")
    if not have.enabled:
        yield StringCommand("systemctl", "enable", name)
    if not have.active:
        yield script(_CONTROL, "start", name)
    elif restart is not None and have.version not in (None, version):
        yield restart
    elif unit_changes or have.version != version:
        yield script(_CONTROL, "restart", name)
    else:
        return False
    return True


# A new version has to make a node ready that was ready, or the one before it comes back, with the last verified spec.
_JUDGE = """
unit=$1 command=$2 patience=$3 base=$4 spec=$5 verified=$6
cd "$base"
new=$(basename "$(readlink current)")
old=$(basename "$(readlink previous)")
why="it does not start"
if systemctl restart "$unit"; then
  why=$(timeout "$((patience + 30))" "$command" wait --timeout "$patience" 2>&1) && exit 0
fi
echo "agent $new has not made the node ready, which was so by $old: $why"
journalctl --unit="$unit" --lines=20 --output=cat --no-pager
ln -sfn "versions/$old" .current.new
mv -T .current.new current
rm previous
if [ -e "$verified" ] && ! cmp -s "$verified" "$spec"; then
  install -m 644 "$verified" "$spec.new"
  mv -T "$spec.new" "$spec"
fi
systemctl restart "$unit"
echo "rolled back to $old"
exit 1
"""

# In a unit of its own, so that it is seen through although the connection may be lost.
_TRY = """
trial=$1; shift
began=$(date +%s)
systemd-run --quiet --collect --wait --unit="$trial" /bin/sh -ec "$@" && exit 0
journalctl --unit="$trial" --since="@$began" --output=cat --no-pager >&2
exit 1
"""


def _on_trial(patience: int) -> StringCommand:
    # systemd takes "$" in a command for a variable's, and "$$" for "$".
    judge = _JUDGE.replace("$", "$$")
    return script(_TRY, TRIAL, judge, "sh", UNIT, COMMAND, str(patience), BASE, SPEC, VERIFIED)


@operation()
def run(version: str, spec_hash: str, unit: OperationMeta, patience: int) -> Commands:
    """Enable the service; start it, or restart it for another version or unit, or reload it for another spec.

    If the node was ready by another version, and is not within ``patience`` seconds by this one, that one comes back by
    itself, with the last verified spec, and the operation fails.
    """
    status = host.get_fact(NodeStatus)
    trial = _on_trial(patience) if status is not None and status.ready else None
    if (yield from serve(UNIT, version, unit, trial)):
        return
    if status is None or status.report.spec_hash != spec_hash:
        yield StringCommand("systemctl", "reload", UNIT)
