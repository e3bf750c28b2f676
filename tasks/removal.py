"""A node is given back: its spec is withdrawn, so that the agent itself puts values back, and then all that is ours goes.

What stays: installed packages, and modules that are loaded. What needs a boot (kernel arguments, a module's options) is named.
"""

from __future__ import annotations

import importlib
import pkgutil
from io import StringIO

from pyinfra.api.command import FileUploadCommand, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.facts.files import FileContents

import tasks
from agent.spec.nic import DisruptionPolicy, Nic, Selector, Vfs
from agent.spec.node import Irqs, NodeSpec, Rps, SpecError, Xps, parse, spec_hash, to_json
from tasks import before, container_runtime, erdma, irqbalance, kubernetes, peer_memory, reboot, reporter
from tasks.agent import BASE, UNIT, UNIT_FILE, AgentVersions
from tasks.common.commands import Commands, refuse, script
from tasks.common.status import COMMAND, SPEC
from tasks.gate import MARGIN, TIMEOUT
from tasks.node_spec import NodePlan
from tasks.ofed import doca
from tasks.packages import INTERPRETERS, NodePython, vendor_repository

STATE = "/var/lib/trackbed"
REPOSITORIES = ("doca", "erdma", container_runtime.PACKAGE)
FILES = (
    *(
        SPEC,
        f"{SPEC}.previous",
        COMMAND,
        peer_memory.AT_BOOT,
        erdma.AT_BOOT,
        erdma.OPTIONS,
        doca.PREFERENCES,
        irqbalance.SCRIPT,
    ),
    *(path for name in REPOSITORIES for path in vendor_repository.files_of(name)),
)
"""What no task takes away by itself."""


def nothing_given() -> None:
    """Take the tasks' keys from the host at hand: what a task wrote for one goes, as if it had left the inventory."""
    modules = [importlib.import_module(f"tasks.{module.name}") for module in pkgutil.iter_modules(tasks.__path__)]
    for key in [key for module in modules for key in getattr(module, "KEYS", ()) if key is not TIMEOUT]:
        setattr(host.data, key.name, None)


def empty(node_name: str, nics: tuple[Nic, ...] = ()) -> NodeSpec:
    """The spec of a node that wants nothing, but for what is said of these NICs."""
    return NodeSpec(
        node_name,
        nics,
        irqs=Irqs(pin=False, irqbalance="untouched"),
        rps=Rps(enable=False),
        xps=Xps(enable=False),
        # Whoever uses a VF keeps it: then the removal ends, and says who that is.
        disruption=DisruptionPolicy(allow="vf-reset"),
    )


def _with_vfs(name: str, select: Selector, count: int) -> Nic:
    return Nic(name, select, required=False, vfs=Vfs(count, derive_macs=False))


@deploy("Spec withdrawn")
def withdraw_spec(node_name: str) -> None:
    """Let the agent give back what it has changed: first VFs, and with them all of theirs, then the rest."""
    timeout = TIMEOUT.here()
    give_back(name="VFs", node_name=node_name, vfs=True, timeout=timeout, _timeout=2 * timeout + MARGIN)
    give_back(name="All other values", node_name=node_name, vfs=False, timeout=timeout, _timeout=2 * timeout + MARGIN)


# Ready is said before the last of what is not required is given back: the plan says what is left. A node that is not ready
# for another reason can still give everything back.
_GIVE_BACK = """
spec=$1 agent=$2 hash=$3 seconds=$4 unit=$5
chmod 644 "$spec.new"
mv -T "$spec.new" "$spec"
systemctl reload-or-restart "$unit"
end=$(($(date +%s) + seconds))
waited=$("$agent" wait --hash "$hash" --timeout "$seconds" 2>&1) || true
while ! said=$("$agent" plan 2>&1); do
  if [ "$(date +%s)" -ge "$end" ]; then
    printf '%s\\n' "$waited" "$said" "not given back after $seconds s: see to that; remove again" >&2
    exit 1
  fi
  sleep 1
done
"""


@operation()
def give_back(node_name: str, vfs: bool, timeout: int) -> Commands:
    """Write a spec that wants nothing, and wait until nothing is left to change.

    :param vfs: the NICs whose number of VFs is another one than before Trackbed are still in it, with that number.
    """
    text = "\n".join(host.get_fact(FileContents, path=SPEC) or ())
    if not text:
        host.noop("the node has no spec")
        return
    try:
        given = parse(text, SPEC)
    except SpecError as error:
        yield refuse(
            f"{error}\nwhat it asked for is not known, so it cannot be given back; deploy once more, then remove"
        )
        return
    wanted = empty(node_name, _as_before(given) if vfs else ())
    if given in (wanted, empty(node_name)) or (vfs and not wanted.nics):
        host.noop("the spec wants nothing")
        return
    new = f"{SPEC}.new"
    yield FileUploadCommand(StringIO(to_json(wanted)), new, remote_temp_filename=host.get_temp_filename(new))
    yield script(_GIVE_BACK, SPEC, COMMAND, spec_hash(wanted), str(timeout), UNIT)


def _as_before(given: NodeSpec) -> tuple[Nic, ...]:
    """The NICs of which the spec has VFs, with so many as they had before the first deploy."""
    none = tuple(_with_vfs(nic.name, nic.select, 0) for nic in given.nics if nic.vfs is not None)
    was = host.get_fact(before.Remembered)
    if not none or was is None or not any(vfs.count for vfs in was.vfs.values()):
        return none
    # Which functions the NICs are, only the node's planner can say: by what it would do to have no VFs.
    python, agent = host.get_fact(NodePython) or INTERPRETERS[0], host.get_fact(AgentVersions).current or ""
    plan = host.get_fact(NodePlan, version=agent, python=python, _stdin=to_json(NodeSpec(given.node_name, none)))
    found = sorted({change.target for change in plan.changes if change.kind == "vfs"}) if plan else []
    return tuple(
        _with_vfs(address.replace(":", "-"), Selector(pci=address), was.vfs[address].count if address in was.vfs else 0)
        for address in found
    )


# The last command: what is not there any more is no failure.
_REMOVE = """
base=$1 state=$2 reporter=$3; shift 3
for unit in trackbed-reporter.service trackbed.service; do
  if systemctl cat "$unit" >/dev/null 2>&1; then systemctl disable --now --quiet "$unit"; fi
  rm -f "/etc/systemd/system/$unit"
done
systemctl daemon-reload
while [ "$1" != -- ]; do rm -f "$1"; shift; done
shift
for folder; do rmdir --ignore-fail-on-non-empty "$folder" 2>/dev/null || true; done
rmdir --ignore-fail-on-non-empty /etc/trackbed 2>/dev/null || true
# DynamicUser= has the folder below private/, and a link to it in its place.
rm -rf "$base" "$state" "$reporter" "${reporter%/*}/private/${reporter##*/}" /run/trackbed
"""


class Leftovers(FactBase[list[str]]):
    """Those of these paths that are there."""

    default = list

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        """Look at each."""
        return script('for path; do if [ -e "$path" ]; then echo "$path"; fi; done', *paths)

    def process(self, output: list[str]) -> list[str]:
        """One path a line."""
        return output


@deploy("Removal")
def everything() -> None:
    """Put back what was written down before the first deploy, and take away the agent and all state."""
    put_back(name="As it was before")
    remove(name="Agent and state")


_PUT_BACK = """
unit=$1 enabled=$2 active=$3; shift 3
if [ "$enabled" = yes ]; then systemctl enable --quiet "$unit"; fi
if [ "$active" = yes ]; then systemctl start "$unit"; fi
for device; do echo 1 > "$device"; done
"""

_RELEASE = """
for package; do
  if command -v apt-mark >/dev/null; then apt-mark unhold "$package"; else dnf versionlock delete "$package"; fi
done
"""


@operation()
def put_back() -> Commands:
    """What no agent keeps: irqbalance's service, drivers for new VFs, holds of packages."""
    was, now = host.get_fact(before.Remembered), host.get_fact(before.Present)
    if was is None:
        host.noop("it is not written down what the node was")
        return
    service = (
        was.irqbalance if was.irqbalance != now.irqbalance and was.irqbalance and now.irqbalance else (False, False)
    )
    probed = sorted(
        address
        for address, vfs in was.vfs.items()
        if vfs.autoprobe and address in now.vfs and not now.vfs[address].autoprobe and not now.vfs[address].count
    )
    if any(service) or probed:
        files = (f"/sys/bus/pci/devices/{address}/sriov_drivers_autoprobe" for address in probed)
        yield script(_PUT_BACK, irqbalance.UNIT, *("yes" if each else "no" for each in service), *files)
    if held := sorted(now.held - was.held):
        yield script(_RELEASE, *held)


@operation()
def remove() -> Commands:
    """Stop the services, and delete what is theirs; wishes for a reboot are told a last time."""
    there = host.get_fact(
        Leftovers, paths=(BASE, STATE, kubernetes.STATE_FOLDER, UNIT_FILE, reporter.UNIT_FILE, *FILES)
    )
    if not there:
        host.noop("nothing of Trackbed is on the node")
        return
    wishes = host.get_fact(reboot.NodeWishes)
    for wish in wishes.due() if wishes else ():
        host.log(f"until its next boot the node is not as it was: {wish}")
    was = host.get_fact(before.Remembered)
    made = [folder for folder in before.FOLDERS if folder not in was.folders] if was else []
    yield script(_REMOVE, BASE, STATE, kubernetes.STATE_FOLDER, *FILES, "--", *made)
