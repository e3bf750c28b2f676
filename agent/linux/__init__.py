"""All kernel I/O: implements the protocols of ``machine.py`` on Linux, one module each."""

from __future__ import annotations

import agent.linux._pyroute2  # noqa: F401  before the modules that import pyroute2
from agent.linux.dcb import LinuxDcb
from agent.linux.ethtool import LinuxEthtool
from agent.linux.events import LinuxEvents
from agent.linux.files import LinuxFiles
from agent.linux.kubelet import LinuxKubelet
from agent.linux.namespaces import LinuxNamespaces
from agent.linux.netlink import LinuxNetlink
from agent.linux.processes import LinuxProcesses
from agent.linux.rdma import LinuxRdma
from agent.linux.system import LinuxSystem
from agent.machine import Machine


def machine(each_alone: bool = False) -> Machine:
    """This machine; ``each_alone`` as in :class:`LinuxNetlink`."""
    return Machine(
        files=LinuxFiles(),
        netlink=LinuxNetlink(each_alone),
        processes=LinuxProcesses(),
        ethtool=LinuxEthtool(),
        kubelet=LinuxKubelet(),
        system=LinuxSystem(),
        dcb=LinuxDcb(),
        rdma=LinuxRdma(),
        namespaces=LinuxNamespaces(),
        events=LinuxEvents(),
    )
