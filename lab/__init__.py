"""The virtual fleet: QEMU machines with real SR-IOV, RDMA, systemd, sshd and apt, on a host without KVM."""

from lab.errors import LabError
from lab.fleet import nodes
from lab.hardware import ALL_MACHINES, MACHINES, Machine, Nic
from lab.node import Node

__all__ = ["ALL_MACHINES", "MACHINES", "LabError", "Machine", "Nic", "Node", "nodes"]
