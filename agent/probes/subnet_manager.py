"""A subnet manager (opensm, or a switch's) has configured the InfiniBand ports. Until then they send nothing.

The kernel keeps what the last subnet manager has set, so the probe does not notice that a subnet manager has stopped since.
From the kernel's source (drivers/infiniband/core/sysfs.c): not run on InfiniBand.
"""

from __future__ import annotations

from agent.hardware.rdma import RdmaDevice, RdmaPort
from agent.kinds import rdma
from agent.probes.rdma_devices import in_ports, judged
from agent.report.records import HOST, Condition, Severity, Stage
from agent.spec.nic import RdmaDevices
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

TYPE = "SubnetManager"
STAGE: Stage = "network"
SEVERITY: Severity = "required"

REMEDY = "start opensm on a node of this subnet or a switch's subnet manager, and see its log for this port's GUID"


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if a port of a required NIC is not configured. No condition on a node without InfiniBand ports.

    With ``rdma.at_least`` it is True if that many NICs have no fault.
    """
    devices = (
        by_function for address, of_nic in have[rdma.NAME].items() if address != HOST for by_function in of_nic.values()
    )
    ports = (port for each in devices for device in each for port in device.ports)
    if not any(port.link_layer == "InfiniBand" for port in ports):
        return []
    return judged(TYPE, "NotConfigured", "AllConfigured", want, have, in_ports(_faults))


def _faults(nic: WantedNic, wanted: RdmaDevices, target: str, device: RdmaDevice, port: RdmaPort) -> list[str]:
    """Why a port counts as not configured. One without a physical link does not: RdmaPorts reports it."""
    if port.link_layer != "InfiniBand" or port.state in (None, "DOWN"):
        return []
    if not port.sm_lid:
        return [f"SM LID 0 ({REMEDY})"]
    return [] if port.state == "ACTIVE" else [f"state {port.state}, SM LID {port.sm_lid} ({REMEDY})"]
