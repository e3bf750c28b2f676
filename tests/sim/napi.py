"""The simulated NAPI instances: one for each queue of a netdev that is up, as Linux 6.18 was seen to have them for veth."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import define, field

from tests.sim.tree import error

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel

NET = "/sys/class/net"
FILES = {"defer_hard_irqs": "napi_defer_hard_irqs", "gro_flush_timeout": "gro_flush_timeout", "threaded": "threaded"}
MOST = 2**31 - 1


@define(eq=False)
class Napis:
    """``each_alone``: the settings of an instance can be set (since Linux 6.13); before, it has none of its own.

    ``threads``: the thread of each instance, as long as it has one (as since Linux 6.17; before, it stayed for ever).
    """

    kernel: Kernel
    each_alone: bool = True
    threads: dict[int, int] = field(factory=dict)
    _of: dict[int, dict[int, dict[str, int]]] = field(factory=dict)
    _next: int = 257

    def appear(self, name: str) -> None:
        for file in FILES.values():
            if f"{NET}/{name}/{file}" not in self.kernel.tree.files:
                self.kernel.tree.put(f"{NET}/{name}/{file}", "0")

    def forget(self, ifindex: int) -> None:
        """The driver frees the instances with the queues, and with them what was set of each."""
        for id in self._of.pop(ifindex, {}):
            self._end(id)

    def of(self, ifindex: int) -> Mapping[int, Mapping[str, int]]:
        there = self._instances(ifindex)
        irqs = dict(zip(there, sorted(self.kernel.netlink.queue_irqs(ifindex)), strict=False))
        told = {id: {"irq": irqs[id]} if id in irqs else {} for id in there}
        own = there if self.each_alone else {id: dict[str, int]() for id in there}
        return {id: {**own[id], **told[id], **self._thread(id, has["threaded"])} for id, has in there.items()}

    def _thread(self, id: int, threaded: int) -> dict[str, int]:
        if not threaded:
            self._end(id)
            return {}
        pid = self.threads.setdefault(id, 100 + id)
        self.kernel.host.affinities.setdefault(pid, tuple(range(self.kernel.cpus)))
        return {"pid": pid}

    def _end(self, id: int) -> None:
        self.kernel.host.affinities.pop(self.threads.pop(id, 0), None)

    def _instances(self, ifindex: int) -> dict[int, dict[str, int]]:
        link = self.kernel.by_ifindex(ifindex).link
        queues = self.kernel.ethtool.queues(ifindex) if link.up else 0
        there = self._of.setdefault(ifindex, {})
        if len(there) != queues:
            there.clear()
            read = self.kernel.tree.read
            for _ in range(queues):
                ways = {setting: int(read(f"{NET}/{link.name}/{file}")) for setting, file in FILES.items()}
                there[self._next] = {**ways, "irq_suspend_timeout": 0}
                self._next += 1
        return there

    def set(self, napi: int, given: Mapping[str, int]) -> None:
        self.kernel.refuse("napi", str(napi), str(given))
        if not self.each_alone:
            raise error(errno.EOPNOTSUPP, str(napi))
        if given.get("defer_hard_irqs", 0) > MOST:
            raise error(errno.ERANGE, str(napi))
        instances = next((each for each in self._of.values() if napi in each), None)
        if instances is None:
            raise error(errno.ENOENT, str(napi))
        instances[napi] |= given

    def write(self, path: str, ifindex: int, text: str) -> None:
        """A file of a netdev sets the instances that there are, and those that come."""
        setting = next(setting for setting, file in FILES.items() if file == path.rpartition("/")[2])
        if setting == "threaded" and (int(text) > 1 or not self._instances(ifindex)):
            raise error(errno.EOPNOTSUPP, path)
        if setting == "defer_hard_irqs" and int(text) > MOST:
            raise error(errno.ERANGE, path)
        self.kernel.tree.put(path, text)
        for has in self._instances(ifindex).values():
            has[setting] = int(text)
