"""The InfiniBand ports have the partition keys (P_Keys) that the spec requires.

The subnet manager assigns them to the GUIDs of ports, also of VFs, so they are checked and not set. Only mlx4 lets the host
choose which of the PF's keys each VF sees (/sys/class/infiniband/DEVICE/iov, MLNX_OFED's manual). From vendor documents: not
run on InfiniBand.
"""

from __future__ import annotations

from agent.hardware.rdma import RdmaDevice, RdmaPort
from agent.probes.rdma_devices import in_ports, judged
from agent.report.records import Condition, Severity, Stage
from agent.spec.nic import RdmaDevices
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

TYPE = "PartitionKeys"
STAGE: Stage = "network"
SEVERITY: Severity = "required"

FULL = 0x8000
"""The bit of a full member, which may talk to all members of its partition. A limited member may talk only to full ones."""


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if ports of required NICs lack keys; the message names them. No condition if the spec requires no keys."""
    if not any(nic.rdma is not None and nic.rdma.pkeys for nic in want.asked):
        return []
    return judged(TYPE, "KeyMissing", "AllPresent", want, have, in_ports(_faults))


def _faults(nic: WantedNic, wanted: RdmaDevices, target: str, device: RdmaDevice, port: RdmaPort) -> list[str]:
    faults = (_fault(int(key, 16), port.pkeys) for key in wanted.pkeys)
    return [fault for fault in faults if fault is not None]


def _fault(wanted: int, present: tuple[int, ...]) -> str | None:
    if wanted in present or wanted | FULL in present:
        return None
    remedy = "the subnet manager assigns it: see its partitions (opensm: partitions.conf)"
    if wanted & ~FULL in present:
        return f"only a limited member of partition {wanted:#06x} ({remedy})"
    listed = ", ".join(f"{key:#06x}" for key in present) or "none"
    return f"no P_Key {wanted:#06x}, it has {listed} ({remedy})"
