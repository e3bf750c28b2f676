"""The parts that a simulated machine may lack: a kubelet, other network namespaces."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

from agent.machine import Attributes, CmDefaults, DcbState, Ethtool, EventSource, Machine, Namespace, QueuePair


class NoKubelet:
    def allocations(self) -> dict[str, tuple[str, ...]]:
        return {}

    def cpus(self) -> dict[str, frozenset[int]]:
        return {}

    def started(self) -> float:
        return 0.0


class NoSystem:
    def installed_srcversion(self, module: str) -> str | None:
        return None

    def clock_synchronised(self) -> bool:
        return True


class NoNamespaces:
    def searchable(self) -> bool:
        return True

    def holding(self, functions: Collection[str]) -> dict[str, Namespace]:
        return {}

    def files(self, namespace: Namespace) -> AbstractContextManager[Attributes]:
        raise FileNotFoundError(errno.ENOENT, "there is no such network namespace", namespace.path)


class NoDcbOrRdma:
    def state(self, netdev: str) -> DcbState | None:
        return None

    def netns_mode(self) -> str | None:
        return None

    def queue_pairs(self, device: str) -> tuple[QueuePair, ...]:
        return ()

    def cm_defaults(self, device: str, port: int) -> CmDefaults | None:
        return None

    def _refuse(self, *_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    set_pfc = add_dscp = remove_dscp = set_netns_mode = set_cm_defaults = _refuse


class NoEvents:
    def subscribe(self) -> list[EventSource]:
        return []


def machine(files: Any, netlink: Any, processes: Any, ethtool: Ethtool) -> Machine:
    """A machine of the given parts, and nothing else."""
    return Machine(
        files=files,
        netlink=netlink,
        processes=processes,
        ethtool=ethtool,
        kubelet=NoKubelet(),
        system=NoSystem(),
        dcb=NoDcbOrRdma(),
        rdma=NoDcbOrRdma(),
        namespaces=NoNamespaces(),
        events=NoEvents(),
    )
