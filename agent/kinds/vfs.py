"""The number of VFs of a PF (sriov_numvfs)."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from attrs import evolve, frozen

from agent.driver_families import family_of
from agent.hardware.bonds import lag_device
from agent.hardware.functions import device_path, total_vfs, vf_count
from agent.kinds import links
from agent.machine import Machine
from agent.report.records import Change, Disruption
from agent.state.scope import Scope, pfs_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

NAME = "vfs"
AFTER = ("links",)
REACH = "device"
OTHER_WRITERS = ("sriov-network-config-daemon", "NetworkManager")

AUTOPROBE = "sriov_drivers_autoprobe"
"""The file of a PF that says whether the kernel binds new VFs to a driver at once."""


@frozen
class VfCount:
    """How many VFs there are, and how many the device can have. ``ends_lag``: the first VFs take away this RDMA device."""

    count: int
    total: int
    ends_lag: str | None = None


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, VfCount]:
    """The VF counts; ``total`` is 0 without SR-IOV."""
    counts = {}
    for address in pfs_in_scope(want, scope):
        total = total_vfs(machine.files, address)
        count = vf_count(machine.files, address)
        counts[address] = VfCount(count, total, None if count else _ends_lag(machine, want.nics[address]))
    return counts


def _ends_lag(machine: Machine, nic: WantedNic) -> str | None:
    wanted = nic.vf_count() and family_of(nic.function.driver).first_vfs_end_lag
    return lag_device(machine.files, nic.function.address) if wanted else None


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The counts that differ. To change a count that is not 0, the kernel must remove all VFs first."""
    changes = []
    usable = dict(links.usable(want, have))
    for address, nic in sorted(want.nics.items()):
        state: VfCount | None = have[NAME].get(address)
        count = nic.vf_count()
        if state is None or count is None or count == state.count:
            continue
        change = Change(NAME, address, "count", state.count, count)
        if address not in usable:
            changes += _unseen(change, have)
            continue
        if count > state.total:
            has, lower = f"{state.total} VFs at most", f"lower vfs.count to {state.total}"
            if not state.total:
                has, lower = "no SR-IOV as it is set up", "turn SR-IOV on in the BIOS, take vfs out of the spec"
            blocker = f"NIC {nic.nic.name} has {has}, the spec wants {count}{'' if state.total else ' VFs'}"
            remedy = (
                f"{lower}, or raise the limit in the NIC's firmware (Mellanox: SRIOV_EN, NUM_OF_VFS, set by the inventory's "
                "key firmware)"
            )
            change = evolve(change, blocker=blocker, remedy=remedy)
        elif state.count:
            change = evolve(change, disruption=Disruption.VF_RESET)
        elif family_of(nic.function.driver).vf_count_flaps or state.ends_lag is not None:
            change = evolve(change, disruption=Disruption.LINK_FLAP)
        changes.append(change)
    return changes


def _unseen(change: Change, have: Snapshot) -> list[Change]:
    """The blocked change of a PF whose netdev is not in the host's namespace; none if ``links`` has a change for it."""
    status: links.LinkStatus | None = have[links.NAME].get(change.device, {}).get(change.device)
    if status is None or status.link is not None or status.driver is None or status.missing:
        return []
    blocker = (
        f"the PF has no netdev in the host's network namespace to configure its VFs with (driver: {status.driver})"
    )
    remedy = "load ib_ipoib if it is InfiniBand, else take the netdev back from the network namespace that has it"
    return [evolve(change, blocker=blocker, remedy=remedy)]


def absent(change: Change) -> Change:
    """The same change, blocked because its VF does not exist."""
    return evolve(change, blocker="the VF is not there", remedy="it comes with the number of VFs (vfs.count)")


def apply(machine: Machine, change: Change) -> None:
    """Write the count, with autoprobe off: VFs must be configured before a driver reads their configuration.

    bindings turns it on again. Without VFs nothing would, so it stays on then.
    """
    path = device_path(change.device)
    try:
        if change.after:
            machine.files.write(f"{path}/{AUTOPROBE}", "0")
        if change.before:
            # The kernel refuses to change one count to another directly (EBUSY).
            machine.files.write(f"{path}/sriov_numvfs", "0")
        if change.after:
            machine.files.write(f"{path}/sriov_numvfs", str(change.after))
    except OSError as error:
        raise OSError(error.errno, f"{_explain(error)}{_put_back(machine, path, change)}") from error
    # A driver may make fewer, which the kernel takes for a success (sriov_numvfs_store, drivers/pci/iov.c).
    made = vf_count(machine.files, change.device)
    if made != change.after:
        raise OSError(errno.ENOSPC, f"{_differs(made, change.number)}{_put_back(machine, path, change)}")


def _differs(made: int, asked: int) -> str:
    if 0 < made < asked:
        return f"the driver has made {made} of {asked} VFs: it has no room for more; lower vfs.count, or see dmesg"
    # bnxt_sriov_configure in bnxt_sriov.c returns 0 for each of these, and changes nothing.
    causes = "whether the PF is up, its firmware is being reset, or a virtual machine has a VF"
    return f"there are {made} VFs, not {asked}, and the driver has refused nothing; see dmesg, and {causes}"


def _put_back(machine: Machine, path: str, change: Change) -> str:
    """Make the VFs that there were before. :returns: what to add to the error if that fails, too."""
    try:
        if change.before and machine.files.read(f"{path}/sriov_numvfs") == "0":
            machine.files.write(f"{path}/sriov_numvfs", str(change.before))
    except OSError as error:
        return f"; now it has none, for the {change.before} before cannot be made again ({error.strerror})"
    return ""


def _explain(error: OSError) -> str:
    # sriov_enable and sriov_numvfs_store in drivers/pci/iov.c. A driver's own are ENOSPC and EOPNOTSUPP (ice_set_per_vf_res and
    # ice_check_sriov_allowed in ice_sriov.c), EPERM (i40e_pci_sriov_enable, ixgbe_pci_sriov_enable) and a second EBUSY
    # (ice_check_sriov_allowed, ionic_sriov_configure).
    causes = {
        errno.ENOSPC: "ENOSPC from sriov_numvfs: the device is out of MSI-X vectors; lower vfs.count, or let the PF take fewer "
        "(devlink's parameter msix_vec_per_pf_max, if its driver has that)",
        errno.EOPNOTSUPP: "EOPNOTSUPP from sriov_numvfs: the driver makes no VFs on this device as it is; dmesg says why (ice "
        "is in safe mode without the file intel/ice/ddp/ice.pkg of the distribution's firmware package)",
        errno.ENOMEM: "ENOMEM from sriov_numvfs: there is no room in the bridge's memory window (turn on Above 4G Decoding in "
        "the firmware, or boot with pci=realloc), or no bus numbers are left (turn on ARI in the firmware, or lower "
        "vfs.count); dmesg says which",
        errno.ENOENT: "ENOENT from sriov_numvfs: the PF has no driver at this moment, or one that makes no VFs by sysfs; "
        "mlx4_core has the parameter num_vfs (kernel_module_options)",
        errno.EBUSY: "EBUSY from sriov_numvfs: the device is being reset, or something else changed the number of VFs at the "
        "same time",
        errno.EPERM: "EPERM from sriov_numvfs: the driver makes fewer VFs on this device as it is set up (with DCB's traffic "
        "classes, say); lower vfs.count; dmesg says how many it makes",
        errno.ERANGE: "ERANGE from sriov_numvfs: more VFs than the device has; lower vfs.count",
    }
    return causes.get(error.errno or 0, f"sriov_numvfs: {error.strerror}")
