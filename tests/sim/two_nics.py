"""A machine with two NICs, one on each NUMA node, with which most tests of several NICs begin."""

from tests.sim.kernel import Kernel

PF0, PF1 = "0000:21:00.0", "0000:41:00.0"
NAME0, NAME1 = "enp33s0", "enp65s0"
MAC0, MAC1 = "02:00:00:00:01:00", "02:00:00:00:01:01"
IPOIB = "00:00:10:86:fe:80:00:00:00:00:00:00:b8:3f:d2:03:00:12:34:56"
"""The address of an InfiniBand netdev: its queue pair, and its GID."""


def two_nics(cpus: int = 4) -> Kernel:
    kernel = Kernel(cpus=cpus)
    kernel.add_nic(PF0, NAME0, MAC0, node=0)
    kernel.add_nic(PF1, NAME1, MAC1, node=1)
    return kernel
