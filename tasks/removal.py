"""Removes Trackbed from a node: the agent restores original values for an empty spec, then Trackbed's files are deleted.

Installed packages and loaded modules stay. What takes effect only at the next boot (kernel arguments, module options) is
logged.
"""

from __future__ import annotations

from attrs import evolve
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.facts.files import FileContents

from agent.report.names import STATE_FOLDER
from agent.spec.nic import DisruptionPolicy, Nic, Vfs
from agent.spec.node import Irqs, NodeSpec, Rps, SpecError, Xps, parse, spec_hash, to_json
from agent.spec.selector import Selector
from tasks import disruption, kubernetes, original_state, packages, reboot
from tasks.agent import BASE, UNIT, UNIT_FILE, AgentVersions
from tasks.common.commands import Commands, refuse, script, warn
from tasks.common.data import leftovers, task_keys
from tasks.common.status import COMMAND, SPEC
from tasks.common.systemd_reload import ENABLE, LINKS, RELOAD, would_take_gpus
from tasks.common.texts import Present, Texts, replace
from tasks.host import irqbalance, kernel_modules
from tasks.kubernetes import reporter
from tasks.node_spec import planned
from tasks.packages import holds
from tasks.readiness import MARGIN, TIMEOUT


def clear_keys() -> None:
    """Remove the tasks' keys from the current host's data, so that each task deletes the files it wrote for its key."""
    for key in task_keys():
        if key is not TIMEOUT:
            # Without the key, some modules are loaded.
            setattr(host.data, key.name, () if key is kernel_modules.MODULES else None)


def empty_spec(node_name: str, nics: tuple[Nic, ...] = ()) -> NodeSpec:
    """A spec that asks for nothing but these NICs."""
    return NodeSpec(
        node_name,
        nics,
        irqs=Irqs(pin=False, irqbalance="untouched"),
        rps=Rps(enable=False),
        xps=Xps(enable=False),
        # A VF in use is not removed: the removal then fails, and names its user.
        disruption=DisruptionPolicy(allow="vf-reset"),
    )


def _with_vfs(name: str, select: Selector, count: int) -> Nic:
    return Nic(name, select, required=False, vfs=Vfs(count, derive_macs=False, derive_guids=False))


@deploy("Spec withdrawn")
def withdraw_spec(node_name: str) -> None:
    """Let the agent restore original values: first the number of VFs, then everything else."""
    timeout = TIMEOUT.here()
    restore_values(name="VFs", node_name=node_name, vfs=True, timeout=timeout, _timeout=2 * timeout + MARGIN)
    restore_values(
        name="All other values", node_name=node_name, vfs=False, timeout=timeout, _timeout=2 * timeout + MARGIN
    )


# Readiness does not tell whether all values are restored: a node may be ready before the last of them, or not ready for another
# reason. So wait until `trackbed plan` has no changes.
_RESTORE_VALUES = """
agent=$1 hash=$2 seconds=$3 unit=$4
systemctl reload-or-restart "$unit"
end=$(($(date +%s) + seconds))
waited=$("$agent" wait --hash "$hash" --timeout "$seconds" 2>&1) || true
while ! plan=$("$agent" plan 2>&1); do
  if [ "$(date +%s)" -ge "$end" ]; then
    printf '%s\\n' "$waited" "$plan" "not restored after $seconds s: resolve the above, then run the removal again" >&2
    exit 1
  fi
  sleep 1
done
"""


@operation()
def restore_values(node_name: str, vfs: bool, timeout: int) -> Commands:
    """Write an empty spec, and wait until the agent has nothing left to change.

    :param vfs: keep the NICs with VFs in the spec, with the number of VFs that they had before the first deploy.
    """
    text = "\n".join(host.get_fact(FileContents, path=SPEC) or ())
    if not text:
        host.noop("the node has no spec")
        return
    try:
        present = parse(text, SPEC)
    except SpecError as error:
        yield refuse(
            f"{error}\nthe node's spec cannot be read, so its values cannot be restored; deploy once more, then remove"
        )
        return
    wanted = empty_spec(node_name, _original_vfs(present) if vfs else ())
    # An earlier removal may have written this spec, and ended before all values were restored.
    if (vfs and (present == empty_spec(node_name) or not wanted.nics)) or (present == wanted and _is_restored(wanted)):
        host.noop("the spec asks for nothing")
        return
    words = (COMMAND, spec_hash(wanted), str(timeout), UNIT)
    yield from replace({}, {SPEC: to_json(wanted)}, _RESTORE_VALUES, *words)


def _is_restored(spec: NodeSpec) -> bool:
    """Whether the agent has nothing left to change for this spec; also if no agent has run on the node yet."""
    if host.get_fact(AgentVersions).current is None:
        return True
    plan = planned(spec, host.get_fact(AgentVersions).current or "")
    return plan is not None and not plan.changes and not plan.errors


def _original_vfs(present: NodeSpec) -> tuple[Nic, ...]:
    """The NICs that have VFs in the spec, each with the number of VFs from before the first deploy."""
    with_vfs = [nic for nic in present.nics if nic.vfs is not None]
    # VFs are removed from however many functions there are now.
    none = tuple(_with_vfs(nic.name, evolve(nic.select, min=None, max=None), 0) for nic in with_vfs)
    named = {name for nic in with_vfs for name in nic.select.without} - {nic.name for nic in with_vfs}
    none += tuple(
        Nic(nic.name, nic.select, required=False, state=nic.state) for nic in present.nics if nic.name in named
    )
    was = host.get_fact(original_state.Recorded)
    if not none or was is None or not any(vfs.count for vfs in was.vfs.values()):
        return none
    # The record has PCI addresses, the spec has selectors. The node's planner resolves them: it plans to remove all VFs.
    plan = planned(NodeSpec(present.node_name, none), host.get_fact(AgentVersions).current or "")
    addresses = sorted({change.target for change in plan.changes if change.kind == "vfs"}) if plan else []
    return tuple(
        _with_vfs(address.replace(":", "-"), Selector(pci=address), was.vfs[address].count if address in was.vfs else 0)
        for address in addresses
    )


# What is missing already is not an error: an earlier removal may have been interrupted.
_REMOVE = (
    LINKS
    + """
base=$1 state=$2 reporter=$3; shift 3
for unit in trackbed-reporter.service trackbed.service; do
  if systemctl cat "$unit" >/dev/null 2>&1; then systemctl disable --now --quiet "$unit"; fi
  rm -f "/etc/systemd/system/$unit"
done
while [ "$1" != -- ]; do rm -f "$1" "${1%/*}/.${1##*/}.unread"; shift; done
shift
"""
    # After the files: one of them is a drop-in of a unit.
    + RELOAD
    + """
for folder; do rmdir --ignore-fail-on-non-empty "$folder" 2>/dev/null || true; done
rmdir --ignore-fail-on-non-empty /etc/trackbed 2>/dev/null || true
# With DynamicUser= the state directory is a link to a folder in private/.
rm -rf "$base" "$state" "$reporter" "${reporter%/*}/private/${reporter##*/}" /run/trackbed
"""
)


@deploy("Removal")
def remove_all() -> None:
    """Restore the original state of the services, drivers and packages, then remove the agent and all state."""
    refuse_to_leave_parts(name="Nothing else waits")
    restore_original_state(name="Original state restored")
    remove(name="Agent and state")


@operation()
def refuse_to_leave_parts() -> Commands:
    """Refuse while a step is deferred, or a reload would take GPUs: a kubelet's gate that stays needs the agent's command."""
    if not host.get_fact(Present, paths=(BASE, STATE_FOLDER)):
        host.noop("the node has no agent")
    elif why := next(iter(disruption.here().values()), "") or would_take_gpus():
        yield refuse(f"Trackbed is not removed: {why}")


_PROBE = 'for device; do echo 1 > "$device"; done'


@operation()
def restore_original_state() -> Commands:
    """Restore what the agent does not: irqbalance's service, automatic drivers for new VFs, holds of packages."""
    was, now = host.get_fact(original_state.Recorded), host.get_fact(original_state.Current)
    if was is None:
        host.noop("the original state is not recorded")
        return
    service = (
        was.irqbalance if was.irqbalance != now.irqbalance and was.irqbalance and now.irqbalance else (False, False)
    )
    probed = sorted(
        address
        for address, vfs in was.vfs.items()
        if vfs.autoprobe and address in now.vfs and not now.vfs[address].autoprobe and not now.vfs[address].count
    )
    enabled, active = service
    if enabled:
        yield script(ENABLE, irqbalance.UNIT)
    if active:
        yield StringCommand("systemctl", "start", irqbalance.UNIT)
    if probed:
        yield script(_PROBE, *(f"/sys/bus/pci/devices/{address}/sriov_drivers_autoprobe" for address in probed))
    yield from holds.finish()
    noted = host.get_fact(Texts, paths=(holds.PATH,)).get(holds.PATH, "").splitlines()
    if held := sorted((now.held & set(noted)) - was.held):
        yield holds.release(packages.system().family, *held)


@operation()
def remove() -> Commands:
    """Stop the services and delete all files and state. Reboot requests are logged a last time."""
    files = leftovers()
    present = host.get_fact(
        Present, paths=(BASE, STATE_FOLDER, kubernetes.STATE_FOLDER, UNIT_FILE, reporter.UNIT_FILE, *files)
    )
    if not present:
        host.noop("the node has no files of Trackbed")
        return
    reboots = host.get_fact(reboot.NodeRebootRequests)
    for request in reboots.due() if reboots else ():
        host.log(f"the node returns to its original state only at its next boot: {request}")
    if reboots and reboots.drained:
        warn(host, "the Node stays cordoned, as a deploy has left it for a reboot; bring it back by `kubectl uncordon`")
    was = host.get_fact(original_state.Recorded)
    created = [folder for folder in original_state.FOLDERS if folder not in was.folders] if was else []
    yield script(_REMOVE, BASE, STATE_FOLDER, kubernetes.STATE_FOLDER, *files, "--", *created)
