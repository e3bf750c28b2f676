"""Installs the agent on the node in two steps: it is staged, so that it can plan the new spec, and later it is activated.

/opt/trackbed/versions/VERSION  one folder for each version, never changed once it exists
/opt/trackbed/current           a link to the version that the unit and the command `trackbed` run
/opt/trackbed/previous          a link to the version that was current before
"""

from __future__ import annotations

from collections.abc import Generator
from hashlib import sha256
from io import StringIO

from attrs import frozen
from pyinfra.api.command import FileUploadCommand, PyinfraCommand, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host
from pyinfra.facts.server import Arch
from pyinfra.operations import files

from tasks import readiness
from tasks.common import archive, systemd_reload, units
from tasks.common.commands import Commands, changes, refuse, script
from tasks.common.facts import FactBase
from tasks.common.status import COMMAND, OBSERVED, SPEC, VERIFIED, NodeStatus
from tasks.common.templates import render
from tasks.packages import FIND_PYTHON, INTERPRETERS, NO_PYTHON, NodePython

BASE = "/opt/trackbed"
UNIT = "trackbed.service"
UNIT_FILE = f"{units.FOLDER}/{UNIT}"
TRIAL = "trackbed-upgrade.service"
UNIT_TEMPLATE = archive.ROOT / "templates" / f"{UNIT}.j2"

LEFTOVERS = (COMMAND,)


def folder(version: str) -> str:
    """The path of a version's folder on the node."""
    return f"{BASE}/versions/{version}"


@frozen
class Versions:
    """The agent's versions on a node."""

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
    """The agent's versions on the node."""

    default = Versions
    shell = _VERSIONS
    words = (BASE,)

    def process(self, output: list[str]) -> Versions:
        """Parse lines such as `current 0.1.0-0123456789ab`."""
        lines = [line.split(" ", 1) for line in output]
        links = {link: version for link, version in lines if link != "staged"}
        staged = frozenset(version for word, version in lines if word == "staged")
        return Versions(links.get("current"), links.get("previous"), staged)


@frozen
class Service:
    """A unit's state. ``version``: what its main process runs. ``stale``: its file was written after the process started."""

    active: bool = False
    enabled: bool = False
    stale: bool = False
    version: str | None = None


_SERVICE = (
    units.STALE
    + """
systemctl show --property=ActiveState,UnitFileState,NeedDaemonReload "$1"
stale "$1" "$2"
pid=$(systemctl show --property=MainPID --value "$1")
if [ -r "/proc/$pid/cmdline" ]; then echo "Command=$(tr '\\0' ' ' < "/proc/$pid/cmdline" || true)"; fi
"""
)


class AgentService(FactBase[Service]):
    """The state of a unit that runs the agent's archive. ``since``: systemd's property with the time of its start."""

    default = Service

    def command(self, unit: str, since: str = "ExecMainStartTimestamp") -> StringCommand:
        """Print systemd's properties, and the main process's command line, which names the version."""
        return self.script(_SERVICE, unit, since)

    def process(self, output: list[str]) -> Service:
        """Parse lines of NAME=VALUE."""
        properties = dict(line.split("=", 1) for line in output if "=" in line)
        running = [word for word in properties.get("Command", "").split() if word.startswith(f"{BASE}/versions/")]
        return Service(
            active=properties.get("ActiveState") in ("active", "reloading"),
            enabled=properties.get("UnitFileState") == "enabled",
            stale=properties.get("NeedDaemonReload") == "yes",
            version=running[0].rpartition("/")[2] if running else None,
        )


def release() -> str:
    """The version that this checkout builds for the node."""
    return archive.version(host.get_fact(Arch))


@deploy("Agent")
def stage(version: str) -> None:
    """Install the version on the node, beside the one that runs."""
    if version not in host.get_fact(AgentVersions).staged:
        # Built now, so that a library that cannot be fetched stops the run before any node is changed.
        archive.build(host.get_fact(Arch))
    unpack(name="Stage", version=version)


# Python may then open no file that is in no package (github.com/linux-application-whitelisting/fapolicyd/issues/135).
_WHITELIST = """
whitelisted() {
  if systemctl --quiet is-active fapolicyd; then
    echo "fapolicyd runs, and may keep Python from the agent's files; allow them: echo 'allow perm=any all : dir=$1/' >" \\
      "/etc/fapolicyd/rules.d/20-trackbed.rules, then fagenrules --load; its journal names what it has denied" >&2
  fi
}
"""

# The checksum comes by SSH, as the commands do: so a file that another user exchanged in a folder that all may write is refused
# (docs/decisions/0029-an-archive-by-ssh-has-a-checksum.md).
# Unpacked beside its place, flushed to disk, then renamed: neither a reader nor a power cut finds half a version.
_UNPACK = (
    _WHITELIST
    + """
archive=$1 versions=$2 version=$3 python=$4 checksum=$5
# A deploy before this one may have made them with another umask.
chmod 755 "${versions%/*}" "$versions"
if ! echo "$checksum  $archive" | sha256sum --check --status; then
  rm -f "$archive"
  echo "$archive is not what the control host sent; run the deploy again, and see who can write to pyinfra's TEMP_DIR" >&2
  exit 1
fi
find "$versions" -mindepth 1 -maxdepth 1 -name '.new.*' -mmin +60 -exec rm -rf {} +
find "${versions%/*}" -mindepth 1 -maxdepth 1 -name '*.tar.gz' -mmin +60 -exec rm -f {} +
new=$(mktemp -d "$versions/.new.XXXXXX")
trap 'rm -rf "$new" "$archive"' EXIT
# Without this, dash ends at a signal without the trap above.
trap 'exit 129' HUP INT TERM
tar -xzf "$archive" -C "$new" --no-same-owner
chmod 755 "$new"
"$python" -I -m compileall -q --invalidation-mode unchecked-hash -s "$new" -p "$versions/$version" "$new" ||
  { whitelisted "${versions%/*}"; exit 1; }
sync -f "$new"
mv -T "$new" "$versions/$version" || test -d "$versions/$version"
"""
)


@operation()
def unpack(version: str) -> Commands:
    """Upload and unpack the version, unless the node has it."""
    if version in host.get_fact(AgentVersions).staged:
        host.noop(f"agent {version} is on the node")
        return
    uploaded = f"{BASE}/{version}.tar.gz"
    yield script('mkdir -p "$1"', f"{BASE}/versions")
    python = host.get_fact(NodePython)
    if python is None:
        yield refuse(NO_PYTHON)
        return
    built = archive.build(host.get_fact(Arch))
    yield FileUploadCommand(str(built), uploaded, remote_temp_filename=host.get_temp_filename(uploaded))
    yield script(_UNPACK, uploaded, f"{BASE}/versions", version, python, sha256(built.read_bytes()).hexdigest())


@deploy("Agent")
def activate(version: str, spec_hash: str) -> None:
    """Run the staged version as a service, with the delivered spec, which has this hash."""
    switch(name="Switch", version=version)
    launcher(name="Command")
    unit = files.template(name="Unit", src=str(UNIT_TEMPLATE), dest=UNIT_FILE, mode="644", command=COMMAND)
    run(name="Service", version=version, spec_hash=spec_hash, unit=unit, grace_period=readiness.TIMEOUT.here())


_SWITCH = """
cd "$1"
turn() { ln -sfn "$1" ".$2.new"; mv -T ".$2.new" "$2"; }
was=$(readlink current || true)
if [ -n "$3" ] && [ -d "versions/$3" ]; then was="versions/$3"; fi
if [ -n "$was" ] && [ "$was" != "versions/$2" ]; then turn "$was" previous; fi
turn "versions/$2" current
previous=$(readlink previous || true)
for version in versions/*; do
  case "$version" in "versions/$2"|"$previous") ;; *) rm -rf "$version" ;; esac
done
"""


@operation()
def switch(version: str) -> Commands:
    """Point `current` at the version and `previous` at the one that runs; remove all other versions.

    A deploy may have been interrupted after it had switched, so `current` may be a version that never ran.
    """
    have = host.get_fact(AgentVersions)
    if have.current == version and have.staged <= {have.current, have.previous}:
        host.noop(f"agent {version} is current")
        return
    if have.current not in (None, version) and not host.state.is_executing:
        host.log(f"agent: {have.current} -> {version}")
    yield script(_SWITCH, BASE, version, host.get_fact(AgentService, unit=UNIT).version or "")


@operation()
def launcher() -> Commands:
    """Write the command `trackbed`."""
    text = launcher_text(host.get_fact(NodePython) or INTERPRETERS[0])
    yield from files.put._inner(src=StringIO(text), dest=COMMAND, mode="755")


def launcher_text(python: str) -> str:
    """The command `trackbed`.

    It resolves the link `current` once, at its start: otherwise a running agent would import modules of the next version. If
    the interpreter is gone, it looks for another one.
    """
    others = " ".join(INTERPRETERS)
    find = FIND_PYTHON.strip()
    return render("trackbed.sh.j2", python=python, interpreters=others, find=find, no_python=NO_PYTHON, base=BASE)


# The journal says why the unit does not start.
_CONTROL = (
    _WHITELIST
    + """
systemctl "$1" "$2" || { code=$?; journalctl --unit="$2" --lines=20 --output=cat --no-pager; whitelisted "$3"; exit "$code"; }
"""
)


def serve(
    name: str, version: str, unit: OperationMeta, restart: StringCommand | None = None
) -> Generator[PyinfraCommand, None, bool]:
    """Enable and start a unit; restart it if it runs another version, or if its file has changed.

    :param restart: the command that restarts it for another version, if not the usual one.
    :returns: whether the unit was started or restarted.
    """
    have = host.get_fact(AgentService, unit=name)
    unit_changes = have.stale or changes(unit)
    # systemd also reads its units again when one is enabled.
    if unit_changes or not have.enabled:
        if why := systemd_reload.would_take_gpus():
            yield refuse(f"{name}: {why}")
            return False
        yield script(systemd_reload.RELOAD)
    if not have.enabled:
        yield StringCommand("systemctl", "enable", name)
    if not have.active:
        yield script(_CONTROL, "start", name, BASE)
    elif restart is not None and have.version not in (None, version):
        yield restart
    elif unit_changes or have.version != version:
        yield script(_CONTROL, "restart", name, BASE)
    else:
        return False
    return True


# If the node was ready, it must be ready with the new version, too. If not, the old version and the last verified spec return.
# The agent of a node in mode observe must not write, so there the last observed spec returns.
_TRIAL = """
unit=$1 command=$2 grace_period=$3 base=$4 spec=$5 kept=$6 observed=$7
cd "$base"
new=$(basename "$(readlink current)")
old=$(basename "$(readlink previous)")
why="it does not start"
if systemctl restart "$unit"; then
  why=$(timeout "$((grace_period + 30))" "$command" wait --timeout "$grace_period" 2>&1) && exit 0
fi
echo "the node was ready with agent $old and is not ready with $new: $why"
journalctl --unit="$unit" --lines=20 --output=cat --no-pager
ln -sfn "versions/$old" .current.new
mv -T .current.new current
rm previous
if [ -e "$observed" ]; then kept=$observed; fi
if [ -e "$kept" ] && ! cmp -s "$kept" "$spec"; then
  install -m 644 "$kept" "$spec.new"
  mv -T "$spec.new" "$spec"
fi
systemctl restart "$unit"
echo "rolled back to $old"
exit 1
"""

# The trial runs in a unit of its own, so that it ends properly even if the connection is lost.
_RUN_TRIAL = """
trial=$1; shift
began=$(date +%s)
systemd-run --quiet --collect --wait --unit="$trial" /bin/sh -ec "$@" && exit 0
journalctl --unit="$trial" --since="@$began" --output=cat --no-pager >&2
exit 1
"""


def _restart_on_trial(grace_period: int) -> StringCommand:
    # systemd replaces $NAME in a command, and reads $$ as $.
    trial = _TRIAL.replace("$", "$$")
    return script(_RUN_TRIAL, TRIAL, trial, "sh", UNIT, COMMAND, str(grace_period), BASE, SPEC, VERIFIED, OBSERVED)


@operation()
def run(version: str, spec_hash: str, unit: OperationMeta, grace_period: int) -> Commands:
    """Enable and start the service; restart it for another version or unit file, reload it for another spec.

    If the node was ready with another version, it must be ready with this one within ``grace_period`` seconds. Else the node
    returns to that version and the last verified spec, and the operation fails.
    """
    status = host.get_fact(NodeStatus)
    trial = _restart_on_trial(grace_period) if status is not None and status.ready else None
    if (yield from serve(UNIT, version, unit, trial)):
        return
    if status is None or status.report.spec_hash != spec_hash:
        yield StringCommand("systemctl", "reload", UNIT)
