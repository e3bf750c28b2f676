"""The GPU driver is loaded, and has every GPU. If the spec asks for peer memory (GPUDirect RDMA), its module is loaded too.

NVIDIA's driver lists GPUs in ``/proc/driver/nvidia/gpus``, by PCI address (seen with one H100 and driver 580.159.04).
``nvidia_peermem`` is its module for memory registration with GPUs. From vendor documents: not seen loaded.
"""

from __future__ import annotations

from attrs import frozen

from agent.hardware.functions import device_path
from agent.hardware.sysfs import names_in
from agent.hardware.vpd import silence
from agent.machine import Machine
from agent.probes import Probe
from agent.report.reasons import condition
from agent.report.records import Condition
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "GpusPresent"

MODULE = "/sys/module/nvidia"
GPUS = "/proc/driver/nvidia/gpus"
PEER_MEMORY = "/sys/module/nvidia_peermem"


@frozen
class Gpus:
    """Whether the driver and its peer memory module are loaded, and the PCI addresses of its GPUs.

    ``silent``: those that fell off the bus. The driver goes on listing them.
    """

    driver: bool
    peer_memory: bool
    addresses: tuple[str, ...]
    silent: tuple[str, ...]


def read(machine: Machine, want: Wanted) -> Gpus:
    """What the driver shows."""
    files = machine.files
    loaded, peer = (bool(names_in(files, folder)) for folder in (MODULE, PEER_MEMORY))
    gpus = tuple(names_in(files, GPUS))
    return Gpus(loaded, peer, gpus, tuple(gpu for gpu in gpus if silence(files, device_path(gpu))))


def judge(want: Wanted, have: Snapshot, facts: Gpus) -> list[Condition]:
    """False if the driver, a GPU or peer memory is missing; the message says what. No condition if the spec has no GPUs."""
    wanted = want.spec.gpus
    if wanted is None:
        return []
    if not facts.driver:
        return [condition(TYPE, "DriverMissing", "the module nvidia is not loaded")]
    if len(facts.addresses) != wanted.count:
        listed = ", ".join(facts.addresses) or "none"
        number = len(facts.addresses)
        message = f"the driver has {number} GPU{'' if number == 1 else 's'} ({listed}), the spec wants {wanted.count}"
        return [condition(TYPE, "GpusMissing", message)]
    if facts.silent:
        return [condition(TYPE, "GpusMissing", f"{', '.join(facts.silent)} fell off the bus")]
    if wanted.peer_memory and not facts.peer_memory:
        return [condition(TYPE, "PeerMemoryMissing", "the module nvidia_peermem is not loaded")]
    return [condition(TYPE, "AllPresent")]


# Stage: on some nodes a container installs the driver.
PROBES = (Probe(name="gpus", type=TYPE, stage="cluster", read=read, judge=judge),)
