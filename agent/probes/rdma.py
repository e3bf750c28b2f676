"""Checks of the RDMA devices that the spec expects.

What only InfiniBand has (partition keys, the subnet manager) is from vendor documents and the kernel's source
(drivers/infiniband/core/sysfs.c): not run on InfiniBand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from attrs import frozen

from agent.driver_families import family_of
from agent.hardware.rdma import CHAR_DEVICES, RAW, Family, RdmaDevice, RdmaPort, gid_fits
from agent.kinds import rdma, vf_links
from agent.probes import Probe
from agent.report.reasons import condition
from agent.report.records import HOST, Condition, FunctionFault
from agent.report.target import is_vf, vf_target
from agent.spec.nic import RdmaDevices
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

Devices = Mapping[str, tuple[RdmaDevice, ...]]
"""The RDMA devices of a PF and its VFs by target."""

# The kernel module that creates each. Only RoCE and InfiniBand have management datagrams: iWARP and EFA have no umad.
MODULES = {"uverbs": "ib_uverbs", "umad": "ib_umad"}
WITH_UMAD = ("RoCE", "InfiniBand")

# A RoCE port has a GID from the netdev's MAC address even if that has no IP address (add_default_gids in
# drivers/infiniband/core/roce_gid_mgmt.c), but for these.
NO_ROCE = (
    "in switchdev mode only VFs have GIDs: then give rdma.pf: false; else RoCE is off (devlink's parameter enable_roce), "
    "or a bond does not use the port now"
)
IWARP = "it does iWARP: have the driver do RoCE, as ice by devlink's parameter enable_roce, or leave gid_type out"

FULL = 0x8000
"""The bit of a full member, which may talk to all members of its partition. A limited member may talk only to full ones."""

SUBNET_MANAGER = (
    "start opensm on a node of this subnet or a switch's subnet manager, and see its log for this port's GUID"
)


@frozen
class Fault:
    """A fault of a function: ``whose`` names the function, device or port, ``what`` says what is wrong with it."""

    target: str
    whose: str
    what: str


Find = Callable[[WantedNic, RdmaDevices, Devices], Iterator[Fault]]


def _judged(
    want: Wanted, have: Snapshot, facts: None, *, type: str, lacking: str, whole: str, find: Find
) -> list[Condition]:
    """The condition of a check that looks for faults, with ``find``, in the NICs for which the spec expects RDMA devices.

    False if required NICs have faults; the message names them. With ``rdma.at_least`` it is True if that many NICs have none.
    No condition if the spec expects no devices.

    :param type: that of the condition; ``lacking`` and ``whole``: its reasons, with and without faults.
    """
    asked = [nic for nic in want.asked if nic.rdma is not None]
    if not asked:
        return []
    by_nic = _faults(want, have, find)
    parts = [
        f"NIC {name}: {', '.join(those)}: {what}"
        for name, each in by_nic.items()
        for what, those in _whose_by_what(each).items()
    ]
    of_functions = tuple(_of_function(fault, lacking) for each in by_nic.values() for fault in each)
    if (least := want.spec.rdma.at_least) is not None:
        fine = sum(not each for each in by_nic.values())
        holds, otherwise = fine >= least, "EnoughOfThem"
        if parts or not holds:
            parts.insert(0, f"{fine} of {len(asked)} NICs are as expected, at least {least} must be")
    else:
        holds, otherwise = not any(by_nic.get(nic.name) for nic in asked if nic.required), "OptionalDiffers"
    if not holds:
        return [Condition(type, "False", lacking, "; ".join(parts), faults=of_functions)]
    return [Condition(type, "True", otherwise if parts else whole, "; ".join(parts), faults=of_functions)]


def _of_function(fault: Fault, reason: str) -> FunctionFault:
    return FunctionFault(fault.target, reason, f"{fault.whose}: {fault.what}")


def _whose_by_what(faults: Iterable[Fault]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for fault in faults:
        grouped.setdefault(fault.what, []).append(fault.whose)
    return grouped


def _faults(want: Wanted, have: Snapshot, find: Find) -> dict[str, list[Fault]]:
    """The faults of each NIC for which the spec expects RDMA devices, by the NIC's name.

    A VF with a driver but no netdev in the host's network namespace belongs to a container or to vfio and is not judged.
    """
    by_nic: dict[str, list[Fault]] = {}
    for address, nic in sorted(want.nics.items()):
        if nic.nic.rdma is None:
            continue
        links = have[vf_links.NAME].get(address, {})
        of_nic = by_nic[nic.nic.name] = []
        for fault in find(nic, nic.nic.rdma, have[rdma.NAME].get(address, {})):
            link = links.get(fault.target)
            if link is None or link.driver is None or link.link is not None:
                of_nic.append(fault)
    return by_nic


def _in_ports(faults: Callable[[WantedNic, RdmaDevices, str, RdmaDevice, RdmaPort], Iterable[str]]) -> Find:
    """Finds faults in the ports of the expected RDMA devices. ``faults`` gets the function's target, device and port."""

    def find(nic: WantedNic, wanted: RdmaDevices, devices: Devices) -> Iterator[Fault]:
        for target, device in _expected_devices(nic, wanted, devices):
            for port in device.ports:
                for what in faults(nic, wanted, target, device, port):
                    yield Fault(target, f"{device.name} port {port.number} ({target})", what)

    return find


def _expected(nic: WantedNic, wanted: RdmaDevices, devices: Devices) -> list[str]:
    address = nic.function.address
    count = nic.vf_count()
    vfs = devices if count is None else (vf_target(address, index) for index in range(count))
    return [*([address] if wanted.pf else []), *(vf for vf in vfs if wanted.vfs and is_vf(vf))]


def _expected_devices(nic: WantedNic, wanted: RdmaDevices, devices: Devices) -> Iterator[tuple[str, RdmaDevice]]:
    for target in _expected(nic, wanted, devices):
        yield from ((target, device) for device in devices.get(target, ()))


def _missing(nic: WantedNic, wanted: RdmaDevices, devices: Devices) -> Iterator[Fault]:
    what = (
        f"no RDMA device (load the RDMA driver of {nic.function.driver or 'the NIC'}; "
        "`rdma link` shows what there is, dmesg why not)"
    )
    for target in _expected(nic, wanted, devices):
        if not devices.get(target):
            yield Fault(target, target, what)


def _char_devices(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if RDMA devices of required NICs lack some; the message names them. No condition if none are expected."""
    asked = {nic.name for nic in want.asked if nic.rdma is not None}
    if not asked:
        return []
    required = {nic.name for nic in want.asked if nic.required}
    by_nic = _faults(want, have, _without_char_device)
    of_functions = [_of_function(fault, "CharDeviceMissing") for each in by_nic.values() for fault in each]
    lacking = _whose_by_what(fault for name, each in by_nic.items() if name in required for fault in each)
    if asked & required and not have[rdma.NAME].get(HOST, {}).get(rdma.RDMA_CM):
        lacking["load rdma_ucm"] = ["rdma_cm"]
        of_functions.append(FunctionFault(HOST, "CharDeviceMissing", "rdma_cm: load rdma_ucm"))
    if not lacking:
        return [condition("RdmaCharDevices", "AllPresent", faults=of_functions)]
    listed = "; ".join(f"{', '.join(dict.fromkeys(those))} ({remedy})" for remedy, those in lacking.items())
    message = f"not in {CHAR_DEVICES}: {listed}"
    return [condition("RdmaCharDevices", "CharDeviceMissing", message, faults=of_functions)]


def _without_char_device(nic: WantedNic, wanted: RdmaDevices, devices: Devices) -> Iterator[Fault]:
    for target, device in _expected_devices(nic, wanted, devices):
        for kind, module in MODULES.items():
            char_devices = [each for each in device.char_devices if each.name.startswith(kind)]
            if not char_devices and (kind != "umad" or device.transport in WITH_UMAD):
                yield Fault(target, f"{kind} of {device.name}", f"load {module}")
            for each in char_devices:
                if not each.present:
                    what = "the kernel has it, /dev/infiniband does not: see journalctl -u systemd-udevd"
                    yield Fault(target, f"{each.name} of {device.name}", what)


def _without_guid(nic: WantedNic, wanted: RdmaDevices, devices: Devices) -> Iterator[Fault]:
    """librdmacm tells devices apart by node GUIDs, so applications that use it fail on a device without one.

    mlx5's VFs on Ethernet have none until their PF has given them a MAC address and their driver is bound again
    (mlx5_eswitch_set_vport_mac), on InfiniBand until it has given them GUIDs.
    """
    for target, device in _expected_devices(nic, wanted, devices):
        if device.transport in ("RoCE", "InfiniBand") and set(device.node_guid or "") == {"0", ":"}:
            what = f"no node GUID, so rdma_cm fails ({_guid_remedy(device, target)})"
            yield Fault(target, f"{device.name} ({target})", what)


def _guid_remedy(device: RdmaDevice, target: str) -> str:
    if not is_vf(target):
        return "see the NIC's firmware"
    if device.transport == "InfiniBand":
        return (
            "give the VF a node_guid and a port_guid, or leave out vfs.derive_guids; then bind it to its driver again"
        )
    return "give the VF a mac, or leave out vfs.derive_macs; then bind it to its driver again"


def _ports(nic: WantedNic, wanted: RdmaDevices, target: str, device: RdmaDevice, port: RdmaPort) -> Iterator[str]:
    if port.link_layer is None or port.state is None:
        yield "its files in sysfs cannot be read (see the kernel log, dmesg)"
        return
    if device.transport == RAW:
        yield f"no GIDs, so no RoCE ({NO_ROCE})"
        return
    if wanted.link_layer is not None and port.link_layer != wanted.link_layer:
        yield f"link layer {port.link_layer}, not {wanted.link_layer} (the NIC's firmware decides; Mellanox: LINK_TYPE)"
    if port.state != "ACTIVE":
        yield f"state {port.state}/{port.physical_state or 'unknown'} ({_state_remedy(device, port, target)})"
    rate = None if family_of(nic.function.driver).invents_rate else wanted.rate
    if rate is not None and (port.gigabits or 0) < rate:
        yield f"rate {port.rate or 'unknown'}, less than {rate} Gbit/s (cable, module, speed of the switch port)"
    iwarp = device.transport == "iWARP"
    layer = "InfiniBand" if wanted.gid_type == "IB" else "Ethernet"
    if wanted.gid_type is not None and not iwarp and port.link_layer != layer:
        yield f"no {wanted.gid_type} GID (its link layer is {port.link_layer}: leave gid_type out)"
        return
    if wanted.gid_type is not None and (iwarp or (not port.gids and port.link_layer == "Ethernet")):
        yield f"no {wanted.gid_type} GID ({IWARP if iwarp else NO_ROCE})"
        return
    for family in wanted.gid_families or (None,) if wanted.gid_type is not None else ():
        if not any(gid_fits(gid, wanted.gid_type, family) for gid in port.gids):
            mapped = f" of an {family} address" if family else ""
            remedy = "see the subnet manager" if wanted.gid_type == "IB" else _gid_remedy(nic, family, target)
            yield f"no {wanted.gid_type} GID{mapped} ({remedy})"


def _state_remedy(device: RdmaDevice, port: RdmaPort, target: str) -> str:
    if port.link_layer == "InfiniBand" and port.state in ("INIT", "ARMED"):
        return "it waits for a subnet manager"
    if device.transport == "InfiniBand":
        policy = 'give the VF link_state "auto" if its PF holds it down (ip link), ' if is_vf(target) else ""
        return f"{policy}check cable and switch port"
    return f"bring {port.netdev or 'its netdev'} up, check cable and switch port"


def _gid_remedy(nic: WantedNic, family: Family | None, target: str) -> str:
    """How to get a GID: the kernel makes one from each address of the netdev."""
    if is_vf(target):
        return "give the VF's netdev an address; `addresses` sets only those of the physical function"
    if not nic.nic.addresses:
        return "give the NIC `addresses`: the kernel makes a GID from each"
    if family is not None and not any(f"IPv{address.version}" == family for address in nic.nic.addresses):
        return f"give the NIC an {family} address in `addresses`: the kernel makes a GID from it"
    return "the kernel makes one from each address of the NIC: see whether the condition Converged names an address"


def _partition_keys(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """The subnet manager assigns keys to the GUIDs of ports, also of VFs, so they are checked and not set.

    Only mlx4 lets the host choose which of the PF's keys each VF sees (/sys/class/infiniband/DEVICE/iov, MLNX_OFED's manual).
    No condition if the spec requires no keys.
    """
    if not any(nic.rdma is not None and nic.rdma.pkeys for nic in want.asked):
        return []
    find = _in_ports(_without_key)
    return _judged(want, have, facts, type="PartitionKeys", lacking="KeyMissing", whole="AllPresent", find=find)


def _without_key(nic: WantedNic, wanted: RdmaDevices, target: str, device: RdmaDevice, port: RdmaPort) -> Iterator[str]:
    remedy = "the subnet manager assigns it: see its partitions (opensm: partitions.conf)"
    for key in (int(key, 16) for key in wanted.pkeys):
        if key in port.pkeys or key | FULL in port.pkeys:
            continue
        if key & ~FULL in port.pkeys:
            yield f"only a limited member of partition {key:#06x} ({remedy})"
        else:
            listed = ", ".join(f"{each:#06x}" for each in port.pkeys) or "none"
            yield f"no P_Key {key:#06x}, it has {listed} ({remedy})"


def _subnet_manager(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """The kernel keeps what the last subnet manager has set, so it is not noticed that this one has stopped since.

    No condition on a node without InfiniBand ports.
    """
    of_nics = (of_nic for address, of_nic in have[rdma.NAME].items() if address != HOST)
    devices = (device for of_nic in of_nics for each in of_nic.values() for device in each)
    ports = (port for device in devices if device.transport != RAW for port in device.ports)
    if not any(port.link_layer == "InfiniBand" for port in ports):
        return []
    find = _in_ports(_not_configured)
    return _judged(want, have, facts, type="SubnetManager", lacking="NotConfigured", whole="AllConfigured", find=find)


def _not_configured(
    nic: WantedNic, wanted: RdmaDevices, target: str, device: RdmaDevice, port: RdmaPort
) -> Iterator[str]:
    """Why a port counts as not configured. One without a physical link does not: RdmaPorts reports it."""
    if device.transport == RAW or port.link_layer != "InfiniBand" or port.state in (None, "DOWN"):
        return
    if not port.sm_lid:
        yield f"SM LID 0 ({SUBNET_MANAGER})"
    elif port.state != "ACTIVE":
        yield f"state {port.state}, SM LID {port.sm_lid} ({SUBNET_MANAGER})"


PROBES = (
    Probe(
        name="rdma_devices",
        type="RdmaDevices",
        stage="device",
        holds="The NICs have the RDMA devices that the spec expects.",
        judge=partial(_judged, type="RdmaDevices", lacking="DeviceMissing", whole="AllPresent", find=_missing),
    ),
    Probe(
        name="rdma_chardevs",
        type="RdmaCharDevices",
        stage="device",
        holds="The character devices that applications and device plugins open are present: uverbs, umad, rdma_cm.",
        judge=_char_devices,
    ),
    Probe(
        name="node_guids",
        type="RdmaNodeGuids",
        stage="device",
        severity="warn",  # NCCL's own verbs, for one, need none
        holds="The expected RDMA devices have node GUIDs.",
        judge=partial(_judged, type="RdmaNodeGuids", lacking="NodeGuidMissing", whole="AllPresent", find=_without_guid),
    ),
    Probe(
        name="rdma_ports",
        type="RdmaPorts",
        stage="network",
        holds="The ports of the expected RDMA devices are ACTIVE, with the wanted link layer, rate and type of GID.",
        judge=partial(_judged, type="RdmaPorts", lacking="PortNotReady", whole="AllActive", find=_in_ports(_ports)),
    ),
    Probe(
        name="partition_keys",
        type="PartitionKeys",
        stage="network",
        holds="The InfiniBand ports have the partition keys (P_Keys) that the spec requires.",
        judge=_partition_keys,
    ),
    Probe(
        name="subnet_manager",
        type="SubnetManager",
        stage="network",
        holds="A subnet manager (opensm, or a switch's) has configured the InfiniBand ports. Until then they send nothing.",
        judge=_subnet_manager,
    ),
)
