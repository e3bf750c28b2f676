"""The ports of the expected RDMA devices can carry traffic: ACTIVE, with the wanted link layer, rate and type of GID."""

from __future__ import annotations

from collections.abc import Iterator

from agent.driver_families import family_of
from agent.hardware.rdma import Family, RdmaDevice, RdmaPort, gid_index
from agent.probes.rdma_devices import in_ports, judged
from agent.report.records import Condition, Severity, Stage
from agent.report.target import is_vf
from agent.spec.nic import RdmaDevices
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

TYPE = "RdmaPorts"
STAGE: Stage = "network"
SEVERITY: Severity = "required"

# A RoCE port has a GID from the netdev's MAC address even if that has no IP address (add_default_gids in
# drivers/infiniband/core/roce_gid_mgmt.c), but for these.
NO_ROCE = (
    "in switchdev mode only VFs have GIDs: then give rdma.pf: false; else RoCE is off (devlink's parameter enable_roce), "
    "or a bond does not use the port now"
)
IWARP = "it does iWARP: have the driver do RoCE, as ice by devlink's parameter enable_roce, or leave gid_type out"


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if ports of required NICs differ from the spec, with the remedy; no condition if the spec expects no devices.

    With ``rdma.at_least`` it is True if that many NICs have no fault.
    """
    return judged(TYPE, "PortNotReady", "AllActive", want, have, in_ports(_faults))


def _faults(nic: WantedNic, wanted: RdmaDevices, target: str, device: RdmaDevice, port: RdmaPort) -> Iterator[str]:
    if port.link_layer is None or port.state is None:
        yield "its files in sysfs cannot be read (see the kernel log, dmesg)"
        return
    if wanted.link_layer is not None and port.link_layer != wanted.link_layer:
        yield f"link layer {port.link_layer}, not {wanted.link_layer} (LINK_TYPE in the NIC's firmware)"
    if port.state != "ACTIVE":
        yield f"state {port.state}/{port.physical_state or 'unknown'} ({_remedy(device, port, target)})"
    rate = None if family_of(nic.function.driver).invents_rate else wanted.rate
    if rate is not None and (port.gigabits or 0) < rate:
        yield f"rate {port.rate or 'unknown'}, less than {rate} Gbit/s (cable, module, speed of the switch port)"
    iwarp = device.transport == "iWARP"
    if wanted.gid_type is not None and (iwarp or (not port.gids and port.link_layer == "Ethernet")):
        yield f"no {wanted.gid_type} GID ({IWARP if iwarp else NO_ROCE})"
        return
    for family in wanted.gid_families or (None,) if wanted.gid_type is not None else ():
        if gid_index(port, wanted.gid_type, family=family) is None:
            mapped = f" of an {family} address" if family else ""
            remedy = "see the subnet manager" if wanted.gid_type == "IB" else _gid_remedy(nic, family, target)
            yield f"no {wanted.gid_type} GID{mapped} ({remedy})"


def _gid_remedy(nic: WantedNic, family: Family | None, target: str) -> str:
    """How to get a GID: the kernel makes one from each address of the netdev."""
    if is_vf(target):
        return "give the VF's netdev an address; `addresses` sets only those of the physical function"
    if not nic.nic.addresses:
        return "give the NIC `addresses`: the kernel makes a GID from each"
    if family is not None and not any(f"IPv{address.version}" == family for address in nic.nic.addresses):
        return f"give the NIC an {family} address in `addresses`: the kernel makes a GID from it"
    return "the kernel makes one from each address of the NIC: see whether the condition Converged names an address"


def _remedy(device: RdmaDevice, port: RdmaPort, target: str) -> str:
    if port.link_layer == "InfiniBand" and port.state in ("INIT", "ARMED"):
        return "it waits for a subnet manager"
    if device.transport == "InfiniBand":
        policy = 'give the VF link_state "auto" if its PF holds it down (ip link), ' if is_vf(target) else ""
        return f"{policy}check cable and switch port"
    return f"bring {port.netdev or 'its netdev'} up, check cable and switch port"
