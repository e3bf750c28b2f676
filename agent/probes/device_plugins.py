"""The kubelet accepts device plugins: without its registration socket no pod gets a VF or an RDMA device.

The condition is True where no kubelet runs. The socket is in /var/lib/kubelet even if the kubelet has another ``--root-dir``.
"""

from __future__ import annotations

from agent.hardware.sysfs import names_in
from agent.kinds.host.sysctls import KUBELETS
from agent.machine import Machine
from agent.report.reasons import condition
from agent.report.records import Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "DevicePlugins"
STAGE: Stage = "cluster"
SEVERITY: Severity = "required"
# A starting kubelet removes its socket and creates it again.
FAIL_AFTER = 2
OF = 2

FOLDER = "/var/lib/kubelet/device-plugins"
SOCKET = "kubelet.sock"


def read(machine: Machine, want: Wanted) -> bool:
    """Whether the socket is there."""
    return SOCKET in names_in(machine.files, FOLDER)


def judge(want: Wanted, have: Snapshot, facts: bool) -> list[Condition]:
    """False if a kubelet runs without a socket."""
    if have.processes.isdisjoint(KUBELETS):
        return [condition(TYPE, "NoKubelet")]
    if facts:
        return [condition(TYPE, "Served")]
    message = f"the kubelet runs, and {FOLDER}/{SOCKET} is not there"
    return [condition(TYPE, "NoSocket", message)]
