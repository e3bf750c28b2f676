"""Enables RDMA to and from GPU memory, by the module nvidia_peermem or by dma-buf, which needs no module.

nvidia_peermem is part of NVIDIA's driver. It needs the ib_core of MLNX_OFED or DOCA-OFED; the kernel's own has no interface
for it. dma-buf needs Linux 5.12 and NVIDIA's open kernel modules (documentation of GPUDirect RDMA). Written from vendor
documents; not run on GPUs. The lab has stand-ins: modules of the same names.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen
from pyinfra.api.deploy import deploy
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks import reboot
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, record
from tasks.common.facts import FactBase
from tasks.common.texts import HEADER, written
from tasks.host import kernel

MODULE = "nvidia_peermem"
AT_BOOT = "/etc/modules-load.d/trackbed-peer-memory.conf"
LEFTOVERS = (AT_BOOT,)
OPEN = "Dual MIT/GPL"
"""The licence of NVIDIA's open kernel modules in modinfo. The licence of the others is NVIDIA."""

Method = Literal["nvidia_peermem", "dma-buf"]


@frozen
class PeerMemory:
    """How RDMA devices reach GPU memory."""

    method: Method


PEER_MEMORY = Key[PeerMemory | None]("peer_memory", None, record(PeerMemory))


@frozen
class Support:
    """What the node has for the two methods. ``gpu_driver``: the licence of the installed module nvidia."""

    loaded: bool = False
    installed: bool = False
    dma_buf: bool = False
    gpu_driver: str | None = None


# Linux has the symbol since 5.12. kallsyms also has symbols of loaded modules.
_SUPPORT = """
if [ -e /sys/module/nvidia_peermem ]; then echo loaded; fi
if modinfo nvidia_peermem >/dev/null 2>&1; then echo installed; fi
if grep -q ' ib_umem_dmabuf_get' /proc/kallsyms; then echo dma-buf; fi
if licence=$(modinfo -F license nvidia 2>/dev/null); then echo "driver $licence"; fi
"""


class PeerMemorySupport(FactBase[Support]):
    """What the node has for the two methods."""

    default = Support
    shell = _SUPPORT

    def process(self, output: list[str]) -> Support:
        """Parse lines of one or two words."""
        lines = {line.strip() for line in output}
        driver = next((line.removeprefix("driver ") for line in lines if line.startswith("driver ")), None)
        return Support("loaded" in lines, "installed" in lines, "dma-buf" in lines, driver)


@deploy("GPU peer memory")
def configure() -> None:
    """Enable the method of the inventory; without the key, do nothing."""
    wanted = PEER_MEMORY.here()
    if wanted is None:
        return
    if wanted.method == "nvidia_peermem":
        load(name=f"{MODULE} now")
        written(name=f"{MODULE} at boot", path=AT_BOOT, text=f"{HEADER}{MODULE}\n")
    else:
        dma_buf(name="dma-buf")
        written(name=f"No {MODULE} at boot", path=AT_BOOT, text="")


# If ib_core lacks the interface, loading fails with EINVAL (nvidia-peermem.c in NVIDIA's open kernel modules).
_LOAD = """
modprobe -- "$1" || { dmesg | tail -n 5; echo "$2"; exit 1; } >&2
test -e "/sys/module/$1"
"""

NOT_LOADED = (
    f"peer_memory: {MODULE} does not load: ib_core is the kernel's own, which has no peer memory, or was installed after "
    "NVIDIA's driver; install MLNX_OFED or DOCA-OFED and then that driver again, or give the method 'dma-buf'"
)


@operation()
def load() -> Commands:
    """Load the module; fail with the remedy if it is not installed or does not load."""
    have = host.get_fact(PeerMemorySupport)
    if have.loaded:
        host.noop(f"{MODULE} is loaded")
    elif not have.installed:
        if not kernel.skip_until_booted(f"{MODULE} is loaded"):
            yield refuse(
                f"peer_memory: the running kernel has no module {MODULE}, which is part of NVIDIA's driver (470 or later); "
                "install that after OFED, or give the method 'dma-buf'"
            )
    # What the module needs may be loaded only by the boot, which comes after this task.
    elif host.state.is_executing and reboot.awaited_by(*kernel.BUILT_BY_DKMS):
        host.noop(f"{MODULE} is loaded once its drivers are")
    else:
        yield script(_LOAD, MODULE, NOT_LOADED)


@operation()
def dma_buf() -> Commands:
    """Check that the kernel and the GPU driver support dma-buf; fail with the remedy if not. Nothing has to be configured."""
    if kernel.skip_until_booted("dma-buf is checked"):
        return
    have = host.get_fact(PeerMemorySupport)
    if have.gpu_driver is None:
        yield refuse(
            "peer_memory: NVIDIA's driver is not installed (no module nvidia); install its open kernel modules"
        )
    elif have.gpu_driver != OPEN:
        yield refuse(
            f"peer_memory: dma-buf needs NVIDIA's open kernel modules, but the licence of nvidia is {have.gpu_driver}; install "
            "the open ones (their package's name contains 'open'), or give the method 'nvidia_peermem'"
        )
    elif not have.dma_buf:
        yield refuse(
            "peer_memory: the kernel's RDMA does not support dma-buf, which needs Linux 5.12 and ib_uverbs loaded; use a later "
            "kernel, load ib_uverbs, or give the method 'nvidia_peermem'"
        )
    else:
        host.noop("the kernel and the GPU driver support dma-buf")
