"""Other network namespaces of the simulated kernel: the netdevs that were moved there, below a prefix of the same tree."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attrs import frozen

from agent.machine import Attributes, Namespace
from tests.sim.tree import error

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel

PCI = "/sys/bus/pci/devices"
NET = "/sys/class/net"


def inside(namespace: str, path: str) -> str:
    """Where the tree keeps what ``path`` is in a namespace: netdevs are each namespace's own, all else is everybody's."""
    folder = path.removeprefix(f"{PCI}/").partition("/")[2] if path.startswith(PCI) else ""
    own = path.startswith(f"{NET}/") or path == NET or folder.split("/")[0] == "net"
    return f"/namespaces/{namespace}{path}" if own else path


@frozen
class SimNamespaces:
    """The kernel's ``namespaces``, by their names; its ``opened`` counts the views that are open."""

    kernel: Kernel

    def searchable(self) -> bool:
        return not self.kernel.hides_namespaces

    def holding(self, functions: Collection[str]) -> dict[str, Namespace]:
        namespaces: dict[str, Namespace] = {}
        if self.kernel.hides_namespaces:
            return namespaces
        for number, name in enumerate(sorted(self.kernel.namespaces)):
            with self.files(Namespace(number, name)) as files:
                for function in functions:
                    try:
                        if files.names(f"{PCI}/{function}/net"):
                            namespaces[function] = Namespace(number, name)
                    except FileNotFoundError:
                        continue
        return namespaces

    @contextmanager
    def files(self, namespace: Namespace) -> Iterator[Attributes]:
        if namespace.path not in self.kernel.namespaces:
            raise error(errno.ENOENT, namespace.path)
        self.kernel.opened.append(namespace.path)
        try:
            yield _View(self.kernel, namespace.path)
        finally:
            self.kernel.opened.remove(namespace.path)


@frozen
class _View:
    kernel: Kernel
    namespace: str

    def read(self, path: str) -> str:
        return self.kernel.files.read(inside(self.namespace, path))

    def write(self, path: str, text: str) -> None:
        self.kernel.files.write(inside(self.namespace, path), text)

    def names(self, path: str) -> list[str]:
        return self.kernel.files.names(inside(self.namespace, path))

    def target(self, path: str) -> str:
        return self.kernel.files.target(inside(self.namespace, path))
