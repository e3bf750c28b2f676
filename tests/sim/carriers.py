"""The carriers of the simulated netdevs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, evolve, field

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel, Netdev


@define
class Carriers:
    """Of netdevs, by their names: ``_lost`` without a carrier until they are brought up, ``_slow`` also then."""

    kernel: Kernel
    _lost: set[str] = field(factory=set)
    _slow: set[str] = field(factory=set)

    def there(self, netdev: Netdev) -> bool:
        """Whether a netdev has a carrier."""
        kernel, sriov = self.kernel, self.kernel.sriov
        physical = sriov.physical(netdev.function)
        if netdev.link.name in self._lost or sriov.only_for_vfs(netdev.function):
            return False
        if physical is None or sriov.only_for_vfs(physical):
            return netdev.link.up
        above = {"auto": kernel.has_netdev(physical) and kernel.netdev(physical).up, "enable": True, "disable": False}
        return netdev.link.up and above[sriov.link_state(netdev.function)]

    def lose(self, function: str, slow: bool = False) -> None:
        """A cable that is out, or a VF that missed its PF's reset: no carrier until it is brought up again.

        ``slow``: also then not before :meth:`regain`, as of an igbvf whose PF is still resetting.
        """
        name = self.kernel.netdev(function).name
        if self.there(self.kernel.netdevs[name]):
            self.count_loss(function)
        self._lost.add(name)
        if slow:
            self._slow.add(name)

    def count_loss(self, function: str) -> None:
        """Count a loss of carrier, as the kernel does (netif_carrier_off, net/sched/sch_generic.c)."""
        netdev = self.kernel.netdevs[self.kernel.netdev(function).name]
        netdev.link = evolve(netdev.link, carrier_downs=1 + netdev.link.carrier_downs)

    def reopened(self, function: str) -> None:
        """mlx5 opens other channels of a netdev (mlx5e_switch_priv_channels in en_main.c)."""
        if self.kernel.driver(function) == "mlx5_core" and self.kernel.netdev(function).up:
            self.count_loss(function)

    def brought_up(self, name: str) -> None:
        self._lost -= {name} - self._slow

    def regain(self, function: str) -> None:
        name = self.kernel.netdev(function).name
        self._lost.discard(name)
        self._slow.discard(name)
