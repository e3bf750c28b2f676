"""How QEMU runs a node's CPUs: on the host's own (KVM), or emulated (TCG), which works everywhere and is many times slower.

Not run: a node under KVM. The hosts that were tried had none that works.
"""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import attrs

from agent.runtime import boot_id, write_atomically
from lab import cache
from lab.choice import chosen
from lab.hardware import CPUS, MEMORY_MIB, NUMA_NODES
from lab.progress import say

KVM_DEVICE = "/dev/kvm"
MARKER = "Unable to mount root fs"
"""What a kernel without a disk says last: by then its CPUs, timers and interrupts have worked."""
PROBE_S = 8.0


@attrs.frozen
class Accelerator:
    """``options``: QEMU's own. ``kernel``: words of the guest's kernel. ``boot_s``: the limit of a boot.

    ``measured``: whether the durations that the lab announces were measured with it.
    """

    name: str
    options: tuple[str, ...]
    kernel: tuple[str, ...]
    boot_s: float
    measured: bool

    def usual(self, seconds: float) -> float:
        """How long a step on a node usually takes; 0: not known."""
        return seconds if self.measured else 0


TCG = Accelerator(
    "tcg",
    # One thread: with one for each CPU a CPU was seen to lose its timer for good (RCU stalls, no ssh), and on a host of two
    # cores it boots slower.
    ("-accel", "tcg,thread=single", "-cpu", "max"),
    (
        # An emulated CPU does not need the first; the second reports false alarms whenever this host is busy.
        "mitigations=off nowatchdog",
        # A one-shot timer whose interrupt emulation loses leaves a halted CPU asleep; a periodic tick wakes it again.
        "highres=off nohz=off",
        # At boot the kernel waits for ten ticks by the CPU's own clock, and panics if this host was busy meanwhile
        # ("timer doesn't work through Interrupt-remapped IO-APIC").
        "no_timer_check",
    ),
    # Four times as long as on two idle cores: the suite runs a second lab beside this one.
    boot_s=300.0,
    measured=True,
)
KVM = Accelerator("kvm", ("-accel", "kvm", "-cpu", "host"), (), boot_s=120.0, measured=False)
BY_NAME = {each.name: each for each in (KVM, TCG)}


def board(accelerator: Accelerator) -> list[str]:
    """QEMU's arguments for the board of a node: CPUs, memory, interrupt controller, IOMMU."""
    cores = CPUS // NUMA_NODES
    return [
        *("-machine", "q35,kernel-irqchip=split", *accelerator.options),
        *("-smp", f"{CPUS},sockets={NUMA_NODES},cores={cores}", "-m", str(MEMORY_MIB)),
        *("-device", "intel-iommu,intremap=on,caching-mode=on"),
    ]


def choose(kernel: Path) -> Accelerator:
    """The accelerator for a new lab, announced in one line. ``TRACKBED_LAB_ACCEL`` (kvm, tcg) decides; else a probe does.

    :param kernel: the nodes' kernel, which the probe boots.
    :raises BadInput: the variable names neither.
    """
    if wanted := chosen("TRACKBED_LAB_ACCEL", BY_NAME, "accelerator"):
        say(f"the nodes run by {wanted.name}, as TRACKBED_LAB_ACCEL says")
        return wanted
    fault = _fault_of_kvm(kernel)
    say("the nodes run on this host's CPUs (kvm)" if not fault else f"the nodes are emulated (tcg): {fault}")
    return TCG if fault else KVM


def _fault_of_kvm(kernel: Path) -> str:
    """Why KVM cannot be used; empty: it can.

    The device may be there and not work, so a guest is booted, once for each boot of this host.
    """
    if not os.access(KVM_DEVICE, os.R_OK | os.W_OK):
        return f"{KVM_DEVICE} {'belongs to other users' if Path(KVM_DEVICE).exists() else 'does not exist'}"
    known = cache.home() / "kvm.json"
    boot = boot_id()
    try:
        probed = json.loads(known.read_text())
        if probed["boot"] == boot:
            return str(probed["fault"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    fault = fault_of_guest(KVM, kernel)
    write_atomically(known, json.dumps({"boot": boot, "fault": fault}))
    return fault


def fault_of_guest(accelerator: Accelerator, kernel: Path) -> str:
    """Boot a kernel alone on a node's board until it looks for its disk; what went wrong, or nothing."""
    words = (
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *board(accelerator),
        *("-serial", "stdio", "-kernel", str(kernel)),
        *("-append", " ".join(("console=ttyS0 panic=-1", *accelerator.kernel))),
    )
    with TemporaryFile() as output:
        try:
            guest = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        except OSError as error:
            return f"QEMU does not start: {error.strerror}"
        try:
            guest.wait(PROBE_S)
        except subprocess.TimeoutExpired:
            guest.kill()
            # A process that hangs in the kernel does not end.
            with suppress(subprocess.TimeoutExpired):
                guest.wait(PROBE_S)
            return f"a guest did not boot by {accelerator.name} within {PROBE_S:.0f} s"
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    if MARKER in said:
        return ""
    last = said.splitlines()[-1] if said else f"QEMU ended with {guest.returncode}"
    return f"a guest does not boot by {accelerator.name}: {last}"
