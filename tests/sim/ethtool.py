"""ethtool for the simulated igb and igbvf (Linux 6.1, an 82576): channels, rings, coalescing, features."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from agent.kinds.ethtool import ADAPTIVE
from agent.machine import Group, Setting
from tests.sim.drivers import DRIVERS

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel, Netdev

NET = "/sys/class/net"
INTEL = ("ice", "i40e", "iavf")

RINGS = 4096
LEAST_RING = 64
MOST_QUEUES = 8
MOST_QUEUES_WITH_VFS = 2

# A few of those that `ethtool -k` shows; which are on and which are fixed is igb's.
FEATURES = {
    "highdma": Setting(True, requested=True, changeable=False),
    "rx-all": Setting(False, requested=False, changeable=True),
    "rx-gro": Setting(True, requested=True, changeable=True),
    "rx-gro-hw": Setting(False, requested=False, changeable=False),
    "rx-ntuple-filter": Setting(False, requested=False, changeable=False),
    "rx-vlan-hw-parse": Setting(True, requested=True, changeable=True),
    "tx-scatter-gather": Setting(True, requested=True, changeable=True),
    "tx-tcp-segmentation": Setting(True, requested=True, changeable=True),
    "tx-vlan-hw-insert": Setting(True, requested=True, changeable=True),
}
FIXED_IN_A_VF = ("rx-all", "rx-vlan-hw-parse", "tx-vlan-hw-insert")


def _error(number: int, what: str = "") -> OSError:
    return OSError(number, what or os.strerror(number))


@define
class _Netdev:
    queues: int
    separate: tuple[int, int]
    rings: dict[str, int]
    features: dict[str, Setting]
    rx_usecs: int = 3
    tx_usecs: int = 3
    adaptive_rx: bool = True
    adaptive_tx: bool = True


@define
class SimEthtool:
    """State lasts as long as the netdev. When a PF's VFs are created or removed, the driver chooses its channels again.

    ``two_modes``: PFs that have combined channels, or rx and tx ones, as bnxt_set_channels has it; others have the first.
    ``separate_only``: PFs that have rx and tx channels only, as tg3 and gve make them.
    ``most``: how many queues a PF can have.
    """

    kernel: Kernel
    two_modes: set[str] = field(factory=set)
    separate_only: set[str] = field(factory=set)
    most: int = MOST_QUEUES
    _netdevs: dict[int, _Netdev] = field(factory=dict)

    def queues(self, ifindex: int) -> int:
        return self._of(ifindex)[1].queues

    def actions(self, ifindex: int) -> list[str]:
        """The names of the netdev's interrupts: paired where there are too few; with VFs, one queue transmits."""
        function, netdev = self._of(ifindex)
        name = self.kernel.by_ifindex(ifindex).link.name
        if (driver := self.kernel.driver(function)) in DRIVERS:
            return DRIVERS[driver].irqs(name, function, netdev.queues)
        queues = range(netdev.queues)
        if self.kernel.sriov.is_vf(function):
            alone = [f"{name}-tx-0", f"{name}-rx-0", name]
            return alone if netdev.queues == 1 else [name, *(f"{name}-TxRx-{queue}" for queue in queues)]
        if not self._paired(ifindex):
            return [name, *(f"{name}-rx-{queue}" for queue in queues), *(f"{name}-tx-{queue}" for queue in queues)]
        transmitting = 1 if self.kernel.sriov.count(function) else netdev.queues
        return [name, *(f"{name}-{'TxRx' if queue < transmitting else 'rx'}-{queue}" for queue in queues)]

    def make_queues(self, netdev: Netdev) -> None:
        """The folders of a netdev's queues."""
        folder, tree = f"{NET}/{netdev.link.name}/queues", self.kernel.tree
        queues = self.queues(netdev.link.ifindex)
        for queue in range(queues):
            tree.put(f"{folder}/rx-{queue}/rps_cpus", "0")
            tree.put(f"{folder}/rx-{queue}/rps_flow_cnt", "0")
            if queues > 1:
                tree.put(f"{folder}/tx-{queue}/xps_cpus", "0")
                tree.put(f"{folder}/tx-{queue}/traffic_class", "0")
            else:
                tree.folder(f"{folder}/tx-{queue}")  # a single queue's attribute gives ENOENT

    def _reset_queues(self, function: str) -> None:
        """The queues and interrupts that it has now take the place of the old ones."""
        netdev = next(netdev for netdev in self.kernel.netdevs.values() if netdev.function == function)
        self.kernel.napi.forget(netdev.link.ifindex)
        self.kernel.tree.remove(f"{NET}/{netdev.link.name}/queues")
        self.make_queues(netdev)
        if netdev.link.up:
            self.kernel.interrupts.free(function)
            self._request_irqs(netdev)

    def set_up(self, netdev: Netdev) -> None:
        """A netdev has interrupts while it is up; no representor has, and no second port that shares those of the first."""
        driver = DRIVERS.get(self.kernel.driver(netdev.function))
        if "pf" in netdev.port or (netdev.dev_port and driver is not None and driver.ports_share):
            return
        if netdev.link.up:
            self._request_irqs(netdev)
        else:
            self.kernel.interrupts.free(netdev.function)

    def _request_irqs(self, netdev: Netdev) -> None:
        self.kernel.interrupts.request_all(netdev.function, self.actions(netdev.link.ifindex))

    def vfs_changed(self, ifindex: int) -> None:
        """igb_sriov_reinit."""
        function, netdev = self._of(ifindex)
        if self.kernel.driver(function) in DRIVERS:
            return
        netdev.queues = self._default(function)
        self._reset_queues(function)

    def _most(self, function: str) -> int:
        igb = self.kernel.driver(function) not in DRIVERS
        return MOST_QUEUES_WITH_VFS if igb and self.kernel.sriov.count(function) else self.most

    def _default(self, function: str) -> int:
        return (
            self.kernel.vf_queues if self.kernel.sriov.is_vf(function) else min(self._most(function), self.kernel.cpus)
        )

    def _paired(self, ifindex: int) -> bool:
        """igb_set_flag_queue_pairs."""
        function, netdev = self._of(ifindex)
        return not self.kernel.sriov.is_vf(function) and netdev.queues > self._most(function) // 2

    # --- Ethtool ------------------------------------------------------------------------------------------

    def settings(self, group: Group, ifindex: int) -> Mapping[str, Setting]:
        return {
            "channels": self._channels,
            "rings": self._rings,
            "coalescing": self._coalescing,
            "features": self._features,
        }[group](ifindex)

    def set(self, group: Group, ifindex: int, given: Mapping[str, int | bool]) -> None:
        {
            "channels": self._set_channels,
            "rings": self._set_rings,
            "coalescing": self._set_coalescing,
            "features": self._set_features,
        }[group](ifindex, given)

    def firmware(self, netdev: str) -> str | None:
        return None

    def _channels(self, ifindex: int) -> Mapping[str, Setting]:
        function, netdev = self._of(ifindex)
        if self.kernel.sriov.is_vf(function):
            return {}
        most = self._most(function)
        if function not in self.two_modes | self.separate_only:
            # mlx5e_ethtool_get_channels, before Linux 6.1: AF_XDP has queues of its own, after the others.
            upper = any(user.queue >= netdev.queues for user in self.kernel.queue_users.get(function, ()))
            shown = 2 if upper and self.kernel.driver(function) == "mlx5_core" else 1
            return {"combined": Setting(shown * netdev.queues, shown * most)}
        rx, tx = netdev.separate
        if function in self.separate_only:
            return {"rx": Setting(rx or netdev.queues, most), "tx": Setting(tx or netdev.queues, most)}
        return {"rx": Setting(rx, most), "tx": Setting(tx, most), "combined": Setting(0 if rx else netdev.queues, most)}

    def _set_channels(self, ifindex: int, given: Mapping[str, int]) -> None:
        function, netdev = self._written(ifindex, "channels", given)
        there = self._channels(ifindex)
        _lacking(given, there)
        if function in self.two_modes | self.separate_only:
            self._switch(
                function, netdev, {name: int(number.value or 0) for name, number in there.items()} | dict(given)
            )
            return
        if given["combined"] > self._most(function) or not given["combined"]:
            raise _error(errno.EINVAL, "requested channel count exceeds maximum")
        if any(user.queue >= given["combined"] for user in self.kernel.queue_users.get(function, ())):
            raise _error(errno.EINVAL)
        if netdev.queues != given["combined"]:
            netdev.queues = given["combined"]
            self._reset_queues(function)
            self.kernel.carriers.reopened(function)

    def _switch(self, function: str, netdev: _Netdev, wanted: Mapping[str, int]) -> None:
        separate = wanted["rx"], wanted["tx"]
        if all(separate) == bool(wanted.get("combined")) or any(separate) != all(separate):
            raise _error(errno.EINVAL)
        netdev.separate, netdev.queues = separate, max(wanted.values())
        self._reset_queues(function)

    def _rings(self, ifindex: int) -> Mapping[str, Setting]:
        return {name: Setting(size, RINGS) for name, size in self._of(ifindex)[1].rings.items()}

    def _set_rings(self, ifindex: int, given: Mapping[str, int]) -> None:
        function, netdev = self._written(ifindex, "rings", given)
        _lacking(given, netdev.rings)
        if any(size > RINGS for size in given.values()):
            raise _error(errno.EINVAL, "requested ring size exceeds maximum")
        netdev.rings |= {name: (max(size, LEAST_RING) + 7) // 8 * 8 for name, size in given.items()}
        self.kernel.carriers.reopened(function)

    def _coalescing(self, ifindex: int) -> Mapping[str, Setting]:
        function, netdev = self._of(ifindex)
        if self.kernel.driver(function) in INTEL:
            return {name: Setting(getattr(netdev, name)) for name in ("rx_usecs", "tx_usecs", *ADAPTIVE)}
        if self.kernel.sriov.is_vf(function):
            return {"rx_usecs": Setting(netdev.rx_usecs)}
        tx_usecs = 0 if self._paired(ifindex) else netdev.tx_usecs
        return {"rx_usecs": Setting(netdev.rx_usecs), "tx_usecs": Setting(tx_usecs)}

    def _set_coalescing(self, ifindex: int, given: Mapping[str, int | bool]) -> None:
        function, netdev = self._written(ifindex, "coalescing", given)
        _lacking(given, self._coalescing(ifindex))
        wrong = any(value > 10_000 or 3 < value < 10 for value in given.values())
        if self.kernel.driver(function) in INTEL:
            # ice_set_rc_coalesce (ice_ethtool.c), __i40e_set_coalesce (i40e_ethtool.c), iavf_set_itr_per_queue.
            wrong = any(name not in ADAPTIVE and getattr(netdev, f"adaptive_{name[:2]}") for name in given)
        elif self._paired(ifindex) and given.get("tx_usecs"):
            wrong = True
        if wrong:
            raise _error(errno.EINVAL)
        for name, value in given.items():
            setattr(netdev, name, value)

    def _features(self, ifindex: int) -> Mapping[str, Setting]:
        return dict(self._of(ifindex)[1].features)

    def _set_features(self, ifindex: int, given: Mapping[str, int | bool]) -> None:
        for name, on in given.items():
            self._set_feature(ifindex, name, bool(on))

    def _set_feature(self, ifindex: int, name: str, on: bool) -> None:
        _, netdev = self._written(ifindex, "feature", {name: on})
        features = netdev.features
        if name not in features or not features[name].changeable:
            raise _error(errno.EOPNOTSUPP)
        features[name] = evolve(features[name], requested=on)
        for name, feature in list(features.items()):
            if feature.changeable:
                features[name] = evolve(feature, value=feature.requested)
        if not features["tx-scatter-gather"].value:
            features["tx-tcp-segmentation"] = evolve(features["tx-tcp-segmentation"], value=False)
        # igb_fix_features: VLAN tags are taken off and put on together.
        features["tx-vlan-hw-insert"] = evolve(features["tx-vlan-hw-insert"], value=features["rx-vlan-hw-parse"].value)

    # ------------------------------------------------------------------------------------------------------

    def _of(self, ifindex: int) -> tuple[str, _Netdev]:
        function = self.kernel.by_ifindex(ifindex).function
        if ifindex not in self._netdevs:
            vf = self.kernel.sriov.is_vf(function)
            features = {
                name: evolve(feature, changeable=feature.changeable and not (vf and name in FIXED_IN_A_VF))
                for name, feature in FEATURES.items()
            }
            size = 1024 if vf else 256
            self._netdevs[ifindex] = _Netdev(self._default(function), (0, 0), {"rx": size, "tx": size}, features)
        return function, self._netdevs[ifindex]

    def _written(self, ifindex: int, what: str, given: Mapping[str, object]) -> tuple[str, _Netdev]:
        name = self.kernel.by_ifindex(ifindex).link.name
        self.kernel.refuse("ethtool", name, f"{what} {dict(given)}")
        return self._of(ifindex)


def _lacking(given: Mapping[str, object], there: Mapping[str, object]) -> None:
    if given.keys() - there.keys():
        raise _error(errno.EOPNOTSUPP)
