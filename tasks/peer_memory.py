"""RDMA to and from GPU memory: the module nvidia_peermem, or dma-buf, which needs none.

nvidia_peermem comes with NVIDIA's driver, and registers with the ib_core of MLNX_OFED or DOCA-OFED: the kernel's own ib_core
has no such interface. dma-buf needs Linux 5.12 and NVIDIA's open kernel modules (GPUDirect RDMA's documentation).
From vendor documents: not run on GPUs; the lab's modules of the same names stand for them.
"""

from __future__ import annotations

from io import StringIO
from typing import Literal

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.operations import files

from tasks import kernel
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, record
from tasks.kernel_modules import HEADER

MODULE = "nvidia_peermem"
AT_BOOT = "/etc/modules-load.d/trackbed-peer-memory.conf"
OPEN = "Dual MIT/GPL"
"""The licence that NVIDIA's open kernel modules tell modinfo; it is NVIDIA of the others."""

Method = Literal["nvidia_peermem", "dma-buf"]


@frozen
class PeerMemory:
    """How RDMA devices reach GPU memory."""

    method: Method


PEER_MEMORY = Key[PeerMemory | None]("peer_memory", None, record(PeerMemory))
KEYS = (PEER_MEMORY,)


@frozen
class Support:
    """What the node has for either method. ``gpu_driver``: the licence of the installed module nvidia."""

    loaded: bool = False
    installed: bool = False
    dma_buf: bool = False
    gpu_driver: str | None = None


# The symbol came with Linux 5.12. kallsyms has the modules' symbols, too.
_SUPPORT = """
if [ -e /sys/module/nvidia_peermem ]; then echo loaded; fi
if modinfo nvidia_peermem >/dev/null 2>&1; then echo installed; fi
if grep -q ' ib_umem_dmabuf_get' /proc/kallsyms; then echo dma-buf; fi
if licence=$(modinfo -F license nvidia 2>/dev/null); then echo "driver $licence"; fi
"""


class PeerMemorySupport(FactBase[Support]):
    """What the node has for either method."""

    default = Support

    def command(self) -> StringCommand:
        """One script for all of it; ib_uverbs, which has the symbol of dma-buf, is loaded by every RDMA device."""
        return script(_SUPPORT)

    def process(self, output: list[str]) -> Support:
        """A word or two on each line."""
        said = {line.strip() for line in output}
        driver = next((line.removeprefix("driver ") for line in said if line.startswith("driver ")), None)
        return Support("loaded" in said, "installed" in said, "dma-buf" in said, driver)


@deploy("GPU peer memory")
def configure() -> None:
    """Carry out what the inventory gives; without the key, nothing."""
    wanted = PEER_MEMORY.here()
    if wanted is None:
        return
    if wanted.method == "nvidia_peermem":
        load(name=f"{MODULE} now")
        files.put(name=f"{MODULE} at boot", src=StringIO(f"{HEADER}{MODULE}\n"), dest=AT_BOOT, mode="644")
    else:
        dma_buf(name="dma-buf")
        files.file(name=f"No {MODULE} at boot", path=AT_BOOT, present=False)


# Without the interface in ib_core the module's own start fails, with EINVAL (nvidia-peermem.c of the open kernel modules).
_LOAD = """
modprobe -- "$1" || { dmesg | tail -n 5; echo "$2"; exit 1; } >&2
test -e "/sys/module/$1"
"""

NOT_LOADED = (
    f"peer_memory: {MODULE} does not load; an ib_core without peer memory (the kernel's own) refuses it, and so does one that "
    "was installed after NVIDIA's driver: install MLNX_OFED or DOCA-OFED, then that driver again, or give the method 'dma-buf'"
)


@operation()
def load() -> Commands:
    """Load the module; refused with the remedy where it is not installed, or cannot do its work."""
    have = host.get_fact(PeerMemorySupport)
    if have.loaded:
        host.noop(f"{MODULE} is loaded")
    elif not have.installed:
        if not kernel.waits(f"{MODULE} is loaded"):
            yield refuse(
                f"peer_memory: there is no module {MODULE} for the running kernel; it comes with NVIDIA's driver (470 or "
                "later): install that after OFED, or give the method 'dma-buf'"
            )
    else:
        yield script(_LOAD, MODULE, NOT_LOADED)


@operation()
def dma_buf() -> Commands:
    """Nothing is to be set; refused with the remedy where the kernel or the GPU driver cannot do it."""
    if kernel.waits("it is looked for"):
        return
    have = host.get_fact(PeerMemorySupport)
    if have.gpu_driver is None:
        yield refuse(
            "peer_memory: NVIDIA's driver is not installed (no module nvidia); install its open kernel modules"
        )
    elif have.gpu_driver != OPEN:
        yield refuse(
            f"peer_memory: dma-buf needs NVIDIA's open kernel modules, and the module nvidia says {have.gpu_driver}; install "
            "those (the package's name has 'open' in it), or give the method 'nvidia_peermem'"
        )
    elif not have.dma_buf:
        yield refuse(
            "peer_memory: this kernel's RDMA does not know dma-buf (Linux 5.12, module ib_uverbs loaded); use a later kernel, "
            "load ib_uverbs, or give the method 'nvidia_peermem'"
        )
    else:
        host.noop("the kernel and the GPU driver have dma-buf")
