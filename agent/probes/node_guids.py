"""The expected RDMA devices have node GUIDs.

librdmacm tells devices apart by them, so applications that use it fail on a device without one, while others work. mlx5's VFs
on Ethernet have none until their PF has given them a MAC address and their driver is bound again (mlx5_eswitch_set_vport_mac),
on InfiniBand until it has given them GUIDs.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent.hardware.rdma import RdmaDevice
from agent.probes.rdma_devices import Devices, Fault, expected, judged
from agent.report.records import Condition, Severity, Stage
from agent.report.target import is_vf
from agent.spec.nic import RdmaDevices
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

TYPE = "RdmaNodeGuids"
STAGE: Stage = "device"
SEVERITY: Severity = "warn"  # NCCL's own verbs, for one, need none


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if a device of a required NIC has no node GUID; no condition if the spec expects no devices."""
    return judged(TYPE, "NodeGuidMissing", "AllPresent", want, have, _without)


def _without(nic: WantedNic, wanted: RdmaDevices, devices: Devices) -> Iterator[Fault]:
    for target in expected(nic, wanted, devices):
        for device in devices.get(target, ()):
            if device.transport in ("RoCE", "InfiniBand") and set(device.node_guid or "") == {"0", ":"}:
                yield Fault(
                    target, f"{device.name} ({target})", f"no node GUID, so rdma_cm fails ({_remedy(device, target)})"
                )


def _remedy(device: RdmaDevice, target: str) -> str:
    if not is_vf(target):
        return "see the NIC's firmware"
    if device.transport == "InfiniBand":
        return (
            "give the VF a node_guid and a port_guid, or leave out vfs.derive_guids; then bind it to its driver again"
        )
    return "give the VF a mac, or leave out vfs.derive_macs; then bind it to its driver again"
