"""The character devices that applications and device plugins open are present: uverbs, umad, rdma_cm."""

from __future__ import annotations

from collections.abc import Iterator

from agent.hardware.rdma import CHAR_DEVICES
from agent.kinds import rdma
from agent.probes.rdma_devices import Devices, Fault, expected, faults, of_function, whose_by_what
from agent.report.reasons import condition
from agent.report.records import HOST, Condition, FunctionFault, Severity, Stage
from agent.spec.nic import RdmaDevices
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

TYPE = "RdmaCharDevices"
STAGE: Stage = "device"
SEVERITY: Severity = "required"

# The kernel module that creates each. Only RoCE and InfiniBand have management datagrams: iWARP and EFA have no umad.
MODULES = {"uverbs": "ib_uverbs", "umad": "ib_umad"}
WITH_UMAD = ("RoCE", "InfiniBand")

MISSING = "CharDeviceMissing"


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if RDMA devices of required NICs lack some; the message names them. No condition if none are expected."""
    asked = {nic.name for nic in want.asked if nic.rdma is not None}
    if not asked:
        return []
    required = {nic.name for nic in want.asked if nic.required}
    by_nic = faults(want, have, _lacking)
    of_functions = [of_function(fault, MISSING) for each in by_nic.values() for fault in each]
    lacking = whose_by_what(fault for name, each in by_nic.items() if name in required for fault in each)
    if asked & required and not have[rdma.NAME].get(HOST, {}).get(rdma.RDMA_CM):
        lacking["load rdma_ucm"] = ["rdma_cm"]
        of_functions.append(FunctionFault(HOST, MISSING, "rdma_cm: load rdma_ucm"))
    if not lacking:
        return [condition(TYPE, "AllPresent", faults=of_functions)]
    listed = "; ".join(f"{', '.join(dict.fromkeys(those))} ({remedy})" for remedy, those in lacking.items())
    return [condition(TYPE, MISSING, f"not in {CHAR_DEVICES}: {listed}", faults=of_functions)]


def _lacking(nic: WantedNic, wanted: RdmaDevices, devices: Devices) -> Iterator[Fault]:
    for target in expected(nic, wanted, devices):
        for device in devices.get(target, ()):
            for kind, module in MODULES.items():
                char_devices = [each for each in device.char_devices if each.name.startswith(kind)]
                if not char_devices and (kind != "umad" or device.transport in WITH_UMAD):
                    yield Fault(target, f"{kind} of {device.name}", f"load {module}")
                for each in char_devices:
                    if not each.present:
                        yield Fault(
                            target,
                            f"{each.name} of {device.name}",
                            "the kernel has it, /dev/infiniband does not: see journalctl -u systemd-udevd",
                        )
