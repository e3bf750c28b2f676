"""Which driver a VF is bound to, and that the driver took the address which the PF gave the VF."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from attrs import frozen

from agent.change import Change, Disruption
from agent.kinds import in_scope, links, vfs
from agent.machine import Machine, read_or
from agent.nics import PCI, Wanted, device_path, driver, netdev, pci_of, vf_addresses
from agent.snapshot import Scope, Snapshot

NAME = "bindings"
AFTER = ("vf_attributes",)
UNKNOWN_UNTIL: tuple[str, ...] = ()
REACH = "device"


@frozen
class Binding:
    """A VF's driver, and its netdev's address as long as that is in the host's network namespace."""

    driver: str | None
    mac: str | None


@frozen
class Bindings:
    """A PF's VFs by index; ``autoprobe``: new VFs are given a driver at once."""

    autoprobe: bool
    vfs: Mapping[int, Binding]


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Bindings]:
    """The bindings of each PF's VFs."""
    found = {}
    for address in in_scope(want, scope):
        vfs = {index: _binding(machine, vf) for index, vf in vf_addresses(machine.files, address).items()}
        autoprobe = read_or(machine.files, f"{device_path(address)}/sriov_drivers_autoprobe", "1") == "1"
        found[address] = Bindings(autoprobe, vfs)
    return found


def _binding(machine: Machine, vf: str) -> Binding:
    name = netdev(machine.files, vf)
    mac = read_or(machine.files, f"/sys/class/net/{name}/address", "") if name else ""
    return Binding(driver(machine.files, vf), mac or None)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Bind the VFs that have no driver; bind again those whose driver holds another address than the PF gave."""
    changes = []
    for address, nic in links.usable(want, have):
        state: Bindings = have[NAME][address]
        count = nic.vf_count() or 0
        if count and not state.autoprobe:
            # With it off, pci_device_can_probe() refuses every driver, the one that we ask for included.
            changes.append(Change(NAME, address, "autoprobe", False, True))
        for index in range(count):
            target = f"{address}#{index}"
            vf = state.vfs.get(index)
            if vf is None or vf.driver is None:
                change = Change(NAME, target, "driver", None, "netdevice")
                changes.append(change if vf else vfs.absent(change))
                continue
            wanted = nic.vf(index)
            if wanted.mac is not None and vf.mac is not None and vf.mac != wanted.mac:
                yields = wanted.owner != "trackbed"
                changes.append(Change(NAME, target, "mac", vf.mac, wanted.mac, Disruption.REBIND, yields=yields))
    return changes


def apply(machine: Machine, change: Change) -> None:
    """Let the kernel find a VF's driver, after taking it from the present one for a new address."""
    files = machine.files
    if change.field == "autoprobe":
        files.write(f"{device_path(change.device)}/sriov_drivers_autoprobe", "1")
        return
    vf = pci_of(files, change.target)
    if change.field == "mac" and driver(files, vf) is not None:
        files.write(f"{PCI}/{vf}/driver/unbind", vf)
    files.write("/sys/bus/pci/drivers_probe", vf)
    if driver(files, vf) is None:
        raise FileNotFoundError(errno.ENOENT, f"no loaded driver takes {vf}; load the VF's driver")
