"""The fake's files: reads from the tree, and writes with what the kernel does in consequence."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from tests.sim import config_space, hugepages, interrupts, napi, variables
from tests.sim.tree import error

NET = "/sys/class/net"
OF_DEVICE = ("/sriov_numvfs", "/vpd")
OF_NETDEV = ("/phys_port_name", "/phys_switch_id", "/speed")
ENTERED = OF_DEVICE + OF_NETDEV

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel


@frozen
class SimFiles:
    """The protocol ``Files`` of the seam."""

    _kernel: Kernel

    def read(self, path: str) -> str:
        if path.endswith(ENTERED):
            self._enter(path)
        if path in self._kernel.unreadable:
            raise error(errno.EIO, path)
        if path in self._kernel.locked_down:
            raise error(errno.EPERM, path)
        if path in self._kernel.disconnected:
            raise error(errno.ENOTCONN, path)
        if path in self._kernel.pipes:
            self._kernel.piped.append(path)
            return Path(self._kernel.pipes[path]).read_text().rstrip()
        if path in interrupts.LOAD:
            self._kernel.interrupts.show_load()
        return self._kernel.tree.read(path)

    def _enter(self, path: str) -> None:
        """Of a function's folder the PCI core answers, but it waits for the driver that makes VFs, and the card has the VPD."""
        if path.endswith(OF_DEVICE):
            self._kernel.enter(path.split("/")[-2])
        elif path.endswith(OF_NETDEV) and path.startswith(NET):
            netdev = self._kernel.netdevs.get(path.split("/")[-2])
            self._kernel.enter(netdev.function if netdev else "")

    def write(self, path: str, text: str) -> None:
        self._enter(path)
        self._kernel.refuse("write", path, text)
        if path == "/sys/bus/pci/drivers_probe":
            self._kernel.sriov.probe(text)
        elif path.endswith("/driver/unbind"):
            self._kernel.unbind(text)
        elif path not in self._kernel.tree.files:
            raise error(errno.ENOENT, path)
        elif path in self._kernel.read_only:
            raise error(errno.EACCES, path)
        elif path in self._kernel.locked_down:
            raise error(errno.EPERM, path)
        elif path.endswith("/nr_hugepages"):
            hugepages.resize(self._kernel, path, int(text))
        elif variables.write(self._kernel, path, text):
            pass
        elif path.endswith(("/rps_flow_cnt", "/rps_sock_flow_entries")):
            self._kernel.tree.put(path, str(1 << (int(text) - 1).bit_length() if int(text) else 0))
        elif path.startswith("/proc/sys/"):
            self._kernel.tree.put(path, variables.shown(path, self._kernel.tree.read(path), text))
        elif path.endswith("/sriov_numvfs"):
            self._kernel.sriov.set_count(path.split("/")[-2], int(text))
        elif path.endswith("/uevent"):
            self._kernel.udev.send_event(path.split("/")[-2])
        elif path.endswith("/driver_override"):
            self._kernel.tree.put(path, text.strip() or "(null)")
        elif path.startswith(NET) and path.endswith(tuple(napi.FILES.values())):
            ifindex = int(self._kernel.tree.read(f"{path.rpartition('/')[0]}/ifindex"))
            self._kernel.napi.write(path, ifindex, text)
        elif path.endswith("/smp_affinity_list"):
            self._kernel.tree.put(path, self._kernel.interrupts.affinity(path, text))
        elif path.endswith("/traffic_class"):
            self._kernel.tree.put(path, f"Global tclass={text}")
        elif path.endswith(("/rps_cpus", "/xps_cpus")):
            self._kernel.tree.put(path, self._kernel.interrupts.steered(path, text))
        else:
            self._kernel.tree.put(path, text)

    def replace(self, path: str, text: str) -> None:
        self._kernel.refuse("replace", path, text)
        self._kernel.tree.put(path, text)

    def names(self, path: str) -> list[str]:
        return self._kernel.tree.names(path)

    def target(self, path: str) -> str:
        return self._kernel.tree.target(path)

    def writable(self, path: str) -> bool:
        return path not in self._kernel.read_only | self._kernel.interrupts.managed

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        self._enter(path)
        self._kernel.read_in_part.append(path)
        if path in self._kernel.unreadable:
            raise error(errno.EIO, path)
        if path not in self._kernel.config:
            raise error(errno.ENOENT, path)
        return bytes(self._kernel.config[path][offset : offset + size])

    def write_at(self, path: str, offset: int, data: bytes) -> None:
        self._kernel.refuse("write", path, data.hex())
        config_space.write(self._kernel.config[path], offset, data)
