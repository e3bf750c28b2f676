"""The NICs have the RDMA devices that the spec expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from attrs import frozen

from agent.hardware.rdma import RdmaDevice, RdmaPort
from agent.kinds import rdma, vf_links
from agent.report.records import Condition, FunctionFault, Severity, Stage
from agent.report.target import is_vf, vf_target
from agent.spec.nic import RdmaDevices
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

TYPE = "RdmaDevices"
STAGE: Stage = "device"
SEVERITY: Severity = "required"

Devices = Mapping[str, tuple[RdmaDevice, ...]]
"""The RDMA devices of a PF and its VFs by target."""


@frozen
class Fault:
    """A fault of a function: ``whose`` names the function, device or port, ``what`` says what is wrong with it."""

    target: str
    whose: str
    what: str


Find = Callable[[WantedNic, RdmaDevices, Devices], Iterator[Fault]]


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if functions of required NICs have no RDMA device. The message names them. No condition if the spec expects none.

    With ``rdma.at_least`` it is True if that many NICs have no fault.
    """
    return judged(TYPE, "DeviceMissing", "AllPresent", want, have, _missing)


def judged(condition: str, lacking: str, whole: str, want: Wanted, have: Snapshot, find: Find) -> list[Condition]:
    """The condition that follows from the faults that ``find`` finds in the NICs with expected RDMA devices.

    :param condition: its type; ``lacking`` and ``whole``: its reasons, with and without faults.
    """
    asked = [nic for nic in want.asked if nic.rdma is not None]
    if not asked:
        return []
    by_nic = faults(want, have, find)
    parts = [
        f"NIC {name}: {', '.join(those)}: {what}"
        for name, each in by_nic.items()
        for what, those in whose_by_what(each).items()
    ]
    of_functions = tuple(of_function(fault, lacking) for each in by_nic.values() for fault in each)
    if (least := want.spec.rdma.at_least) is not None:
        fine = sum(not each for each in by_nic.values())
        holds, otherwise = fine >= least, "EnoughOfThem"
        if parts or not holds:
            parts.insert(0, f"{fine} of {len(asked)} NICs are as expected, at least {least} must be")
    else:
        holds, otherwise = not any(by_nic.get(nic.name) for nic in asked if nic.required), "OptionalDiffers"
    if not holds:
        return [Condition(condition, "False", lacking, "; ".join(parts), faults=of_functions)]
    return [Condition(condition, "True", otherwise if parts else whole, "; ".join(parts), faults=of_functions)]


def of_function(fault: Fault, reason: str) -> FunctionFault:
    """The fault as one of its function."""
    return FunctionFault(fault.target, reason, f"{fault.whose}: {fault.what}")


def whose_by_what(faults: Iterable[Fault]) -> dict[str, list[str]]:
    """Who has each fault."""
    grouped: dict[str, list[str]] = {}
    for fault in faults:
        grouped.setdefault(fault.what, []).append(fault.whose)
    return grouped


def faults(want: Wanted, have: Snapshot, find: Find) -> dict[str, list[Fault]]:
    """The faults of each NIC with expected RDMA devices, by its name.

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


def in_ports(faults: Callable[[WantedNic, RdmaDevices, str, RdmaDevice, RdmaPort], Iterable[str]]) -> Find:
    """Finds faults in the ports of the expected RDMA devices. ``faults`` gets the function's target, device and port."""

    def find(nic: WantedNic, wanted: RdmaDevices, devices: Devices) -> Iterator[Fault]:
        for target in expected(nic, wanted, devices):
            for device in devices.get(target, ()):
                for port in device.ports:
                    for what in faults(nic, wanted, target, device, port):
                        yield Fault(target, f"{device.name} port {port.number} ({target})", what)

    return find


def expected(nic: WantedNic, wanted: RdmaDevices, devices: Devices) -> list[str]:
    """The targets for which the spec expects an RDMA device."""
    address = nic.function.address
    count = nic.vf_count()
    vfs = devices if count is None else (vf_target(address, index) for index in range(count))
    return [*([address] if wanted.pf else []), *(vf for vf in vfs if wanted.vfs and is_vf(vf))]


def _missing(nic: WantedNic, wanted: RdmaDevices, devices: Devices) -> Iterator[Fault]:
    what = (
        f"no RDMA device (load the RDMA driver of {nic.function.driver or 'the NIC'}; "
        "`rdma link` shows what there is, dmesg why not)"
    )
    for target in expected(nic, wanted, devices):
        if not devices.get(target):
            yield Fault(target, target, what)
