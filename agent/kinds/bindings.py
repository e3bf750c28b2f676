"""The driver that each VF is bound to, and whether that driver uses the MAC address and GUID that the PF assigned."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from attrs import evolve, frozen

from agent.driver_families import VFIO, family_of, is_passed_through, is_vfio
from agent.hardware.functions import NET, PCI, RDMA, device_path, driver, ifindex_of, netdev, pci_of, vf_addresses
from agent.hardware.sysfs import names_in, read_or
from agent.kinds import ANY_VALUE, links, vf_attributes, vfs
from agent.machine import Files, Machine, VfInfo
from agent.report.reasons import LOG_IF_LOADED
from agent.report.records import Change, Disruption
from agent.report.target import vf_index, vf_target
from agent.spec.nic import VfAttributes
from agent.state.scope import Scope, in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "bindings"
AFTER = ("vf_attributes",)
REACH = "device"
OTHER_WRITERS = ("sriov-network-config-daemon", "driverctl", "libvirtd", "virtqemud")
# Each of these binds the VF again.
REMAKES_NETDEV = ("driver", "mac", "node_guid")

DRIVERS = "/sys/bus/pci/drivers"
DRIVERS_PROBE = "/sys/bus/pci/drivers_probe"
NETDEVICE = "netdevice"
# The text of driver_override when none is set (driver_override_show, drivers/pci/pci-sysfs.c).
NO_OVERRIDE = "(null)"

NO_VFIO = "vfio-pci is not loaded"


@frozen
class Binding:
    """A VF's driver, and the MAC address of its netdev if that is in the host's network namespace.

    ``isolated`` (the VF is in an IOMMU group), ``node_guid`` and ``override`` (its driver_override) are read only for VFs
    whose spec needs them.
    """

    driver: str | None
    mac: str | None
    isolated: bool = True
    node_guid: str | None = None
    override: str = NO_OVERRIDE


@frozen
class Bindings:
    """A PF's VFs by index. ``autoprobe``: the kernel binds new VFs to a driver at once. ``vfio``: vfio-pci is loaded.

    Both are read only if the spec has VFs, or VFs for vfio-pci.
    """

    autoprobe: bool
    vfs: Mapping[int, Binding]
    vfio: bool


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Bindings]:
    """The bindings of each PF's VFs."""
    asked = any(VFIO in nic.vf_settings("driver").values() for nic in want.nics.values())
    vfio = asked and VFIO in names_in(machine.files, DRIVERS)
    bindings = {}
    for address in in_scope(want, scope):
        nic = want.nics[address]
        bound = {
            index: _binding(machine, vf, nic.vf_wanted(index))
            for index, vf in vf_addresses(machine.files, address).items()
        }
        autoprobe = not nic.vf_count() or read_or(machine.files, f"{device_path(address)}/{vfs.AUTOPROBE}", "1") == "1"
        bindings[address] = Bindings(autoprobe, bound, vfio)
    return bindings


def _binding(machine: Machine, vf: str, wanted: VfAttributes) -> Binding:
    files = machine.files
    name = netdev(files, vf)
    mac = read_or(files, f"{NET}/{name}/address", "") if name else ""
    if mac and wanted.mac not in (None, mac):
        # A bond gives its members one address. Their own is kept in bonding_slave.
        mac = read_or(files, f"{NET}/{name}/bonding_slave/perm_hwaddr", "") or _permanent(machine, name) or mac
    return Binding(
        driver(files, vf),
        mac or None,
        wanted.driver != VFIO or "iommu_group" in names_in(files, device_path(vf)),
        _node_guid(files, vf) if wanted.node_guid else None,
        read_or(files, f"{PCI}/{vf}/driver_override", NO_OVERRIDE) if wanted.driver == NETDEVICE else NO_OVERRIDE,
    )


def _permanent(machine: Machine, name: str | None) -> str:
    """The hardware's address of a netdev below another one: a team, or a macvlan in passthru mode, sets its own there."""
    if name is None or not any(e.startswith("upper_") for e in names_in(machine.files, f"{NET}/{name}")):
        return ""
    link = machine.netlink.link(name)
    return link.permanent_mac if link else ""


def _node_guid(files: Files, vf: str) -> str | None:
    """The node GUID in the spec's form. sysfs writes it as ``0011:2233:4455:6677``."""
    devices = names_in(files, f"{device_path(vf)}/infiniband")
    digits = read_or(files, f"{RDMA}/{devices[0]}/node_guid", "").replace(":", "") if devices else ""
    return ":".join(digits[place : place + 2] for place in range(0, len(digits), 2)) or None


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Bind VFs that have no driver or the wrong one. Rebind VFs whose driver uses another address than the PF assigned."""
    changes = []
    for address, nic in links.usable(want, have):
        state: Bindings = have[NAME][address]
        count = nic.vf_count() or 0
        if count and not state.autoprobe:
            # While it is off, pci_device_can_probe() refuses every driver but an override, even for our write to drivers_probe.
            changes.append(Change(NAME, address, "autoprobe", False, True))
        granted: Mapping[int, VfInfo] = have[vf_attributes.NAME].get(address, {})
        for index in range(count):
            change = _plan_vf(vf_target(address, index), nic.vf(index), state, index, granted.get(index))
            if change is not None and change.field == "mac" and _is_unheard(have[links.NAME][address][address]):
                continue  # it carries nothing now, and is bound again once its PF is up
            changes += [change] if change else []
    return changes


def _is_unheard(pf: links.LinkStatus) -> bool:
    """Whether a VF cannot take its address from the PF, however often it is bound again."""
    return pf.link is not None and not pf.link.up and family_of(pf.driver).vfs_need_pf_up


def _plan_vf(target: str, wanted: VfAttributes, state: Bindings, index: int, granted: VfInfo | None) -> Change | None:
    vf = state.vfs.get(index)
    bound = vf.driver if vf else None
    if wanted.driver == VFIO:
        return None if is_vfio(bound) else _bind_vfio(target, vf, state.vfio)
    if vf is None or bound is None:
        change = Change(NAME, target, "driver", None, NETDEVICE)
        return change if vf else vfs.absent(change)
    if is_passed_through(bound):
        return (
            Change(NAME, target, "driver", bound, NETDEVICE, Disruption.REBIND) if wanted.driver == NETDEVICE else None
        )
    if is_passed_through(vf.override):
        # The next time that it is bound, for an address or by a reload of its driver, that driver would take it.
        return Change(NAME, target, "driver_override", vf.override, None)
    for field, before in (("mac", vf.mac), ("node_guid", vf.node_guid)):
        after = getattr(wanted, field)
        # Rebind only if the PF has the wanted value: the driver reads it from there.
        if before not in (None, after) and after is not None and after == getattr(granted, field, None):
            skip_if_owned = wanted.owner != "trackbed"
            return Change(NAME, target, field, before, after, Disruption.REBIND, skip_if_owned=skip_if_owned)
    return None


def _bind_vfio(target: str, vf: Binding | None, vfio: bool) -> Change:
    bound = vf.driver if vf else None
    change = Change(NAME, target, "driver", bound, VFIO, Disruption.REBIND if bound else Disruption.NONE)
    if not vfio:
        return evolve(change, blocker=NO_VFIO, remedy='load it: kernel_modules = ["vfio-pci"]')
    if vf is None:
        return vfs.absent(change)
    if not vf.isolated:
        remedy = "turn the IOMMU on in the firmware, and boot with intel_iommu=on (AMD's needs no parameter)"
        return evolve(change, blocker="no IOMMU isolates it", remedy=remedy)
    return change


def transients(machine: Machine, want: Wanted, change: Change) -> list[Change]:
    """A VF that is bound again for another address gets a new netdev: it is down, with the driver's MTU and queue length."""
    if change.field not in ("mac", "node_guid"):
        return []
    link = links.status(machine, pci_of(machine.files, change.target)).link
    if link is None:
        return []
    values = {"mtu": link.mtu, "txqueuelen": link.txqueuelen, "state": "up" if link.up else "down"}
    return [Change("vf_links", change.target, field, value, ANY_VALUE) for field, value in values.items()]


def lifted_by(change: Change) -> str:
    """Setting the number of VFs creates a missing VF; it does not load a missing module."""
    return "" if change.blocker == NO_VFIO else vfs.NAME


def apply(machine: Machine, change: Change) -> None:
    """Unbind a VF from its driver if it has one, and have the kernel bind it again."""
    files = machine.files
    if change.field == "autoprobe":
        files.write(f"{device_path(change.device)}/{vfs.AUTOPROBE}", "1")
        return
    vf = pci_of(files, change.target)
    if change.field == "driver_override":
        files.write(f"{PCI}/{vf}/driver_override", "\n")
        return
    bound = driver(files, vf)
    if change.before is not None and bound is not None:
        files.write(f"{PCI}/{vf}/driver/unbind", vf)
        if change.field == "mac":
            # On unbinding, the driver of a trusted VF has set the old address in the PF again (igbvf_down).
            index = vf_index(change.target)
            machine.netlink.set_vf(ifindex_of(files, change.device), index, mac=str(change.after))
    if change.field == "driver":
        _bind(files, vf, VFIO if change.after == VFIO else NO_OVERRIDE)
    else:
        _bind_again(files, vf, bound)


def _bind(files: Files, vf: str, override: str) -> None:
    """Have the kernel bind a VF that has no driver. An override to vfio-pci stays only if vfio-pci takes the VF.

    It is set after the VF was unbound. So a change that ends before leaves no override, and one that ends after it leaves a VF
    without a driver, which the next plan sees.
    """
    replaced = _set_override(files, vf, override)
    try:
        _probe(files, vf, override)
    except OSError:
        if override == VFIO:
            _set_override(files, vf, replaced)
        raise


def _bind_again(files: Files, vf: str, bound: str | None) -> None:
    """Bind a VF to the driver that it had, also if its override names another driver. The override stays as it is."""
    override = read_or(files, f"{PCI}/{vf}/driver_override", NO_OVERRIDE)
    for_now = NO_OVERRIDE if override == NO_OVERRIDE or bound is None else bound
    _set_override(files, vf, for_now)
    try:
        _probe(files, vf, for_now)
    finally:
        _set_override(files, vf, override)


def _probe(files: Files, vf: str, override: str) -> None:
    files.write(DRIVERS_PROBE, vf)
    bound = driver(files, vf)
    if bound is None:
        advice = f"load the VF's driver; {LOG_IF_LOADED}"
        if override == VFIO:
            advice = "see the kernel log (dmesg) for the reason that vfio-pci gives"
        raise FileNotFoundError(errno.ENOENT, f"no loaded driver binds to {vf}; {advice}")
    if is_passed_through(bound) != is_passed_through(override):
        raise FileExistsError(errno.EEXIST, f"{bound} bound to {vf} instead; see what else sets its driver_override")


def _set_override(files: Files, vf: str, override: str) -> str:
    path = f"{PCI}/{vf}/driver_override"
    before = read_or(files, path, NO_OVERRIDE)
    if before != override:
        files.write(path, "\n" if override == NO_OVERRIDE else override)
    return before
