"""udev beside the simulated kernel: how it names netdevs, and its database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, evolve, field

from agent.machine import Link
from tests.sim.sriov import index_of, path_name, vf_name

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel

DATABASE = "/run/udev/data"


@define
class Udev:
    """``pf_names``: the usual name of each PF."""

    kernel: Kernel
    runs: bool = True
    pf_names: dict[str, str] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.kernel.tree.folder(DATABASE)

    def lags(self, function: str) -> None:
        """The function's netdev is there, and udev has not looked at it yet."""
        self.forget(self.kernel.netdev(function))

    def catches_up(self, function: str) -> None:
        self.tell(self.kernel.netdev(function))

    def forget(self, link: Link) -> None:
        self.kernel.tree.remove(f"{DATABASE}/n{link.ifindex}")

    def send_event(self, name: str) -> None:
        """Send the event of a netdev again. udev handles it if it runs."""
        if self.runs:
            self.tell(self.kernel.netdevs[name].link)

    def tell(self, link: Link) -> None:
        """udev derives a name, keeps the present one, and makes the derived one an alternative name."""
        netdev = self.kernel.by_ifindex(link.ifindex)
        usual = self._usual_name(netdev.function)
        if usual and usual != link.name and not self.kernel.named(usual):
            netdev.link = evolve(link, altnames=(*link.altnames, usual))
        properties = f"\nE:ID_NET_NAME_SLOT={usual}" if usual else ""
        text = (
            f"I:1{properties}\nE:ID_NET_LINK_FILE=/usr/lib/systemd/network/99-default.link\nE:ID_NET_NAME={link.name}"
        )
        self.kernel.tree.put(f"{DATABASE}/n{link.ifindex}", text)

    def _usual_name(self, function: str) -> str | None:
        physical = self.kernel.sriov.physical(function)
        if physical is None:
            return self.pf_names.get(function)
        return vf_name(self.pf_names[physical] or path_name(physical), index_of(function))
