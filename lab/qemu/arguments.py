"""The command line of a node's QEMU, and the files and sockets that QEMU makes."""

from collections.abc import Sequence
from pathlib import Path

import attrs

from lab.hardware import CPUS, MEMORY_MIB, NUMA_NODES, Machine, Nic
from lab.image import Image
from lab.qemu.accelerator import Accelerator, board


@attrs.frozen
class QemuFiles:
    """The files and sockets of a node's QEMU in the node's folder."""

    folder: Path

    @property
    def overlay(self) -> Path:
        """The node's own disk, an overlay of the shared image. It has the snapshots."""
        return self.folder / "overlay.qcow2"

    @property
    def pid(self) -> Path:
        """The id of the process, which locks this file."""
        return self.folder / "qemu.pid"

    @property
    def log(self) -> Path:
        """QEMU's own messages."""
        return self.folder / "qemu.log"

    @property
    def console(self) -> Path:
        """The socket of the serial console."""
        return self.folder / "console.sock"

    @property
    def console_log(self) -> Path:
        """The output of the serial console, of all boots."""
        return self.folder / "console.log"

    @property
    def monitor(self) -> Path:
        """The monitor's socket (QMP)."""
        return self.folder / "monitor.sock"

    @property
    def test_port(self) -> Path:
        """The socket of the test port (qtest)."""
        return self.folder / "qtest.sock"

    @property
    def credentials(self) -> Path:
        """The folder with the credentials that systemd reads from SMBIOS."""
        return self.folder / "credentials"


def arguments(
    title: str,
    machine: Machine,
    files: QemuFiles,
    ssh_port: int,
    boot: Sequence[str],
    nics: Sequence[str],
    accelerator: Accelerator,
) -> list[str]:
    """All arguments of a node's QEMU. ``boot`` is of :func:`boot_from`, ``nics`` of :func:`nic_between` for each NIC."""
    per_node = CPUS // NUMA_NODES
    given = [
        *("-name", title, "-nodefaults", "-no-user-config", "-display", "none"),
        *("-daemonize", "-pidfile", str(files.pid), "-D", str(files.log)),
        *board(accelerator),
        *boot,
        # This is unsafe only if this host itself crashes: a flush of the guest reaches the file even if QEMU is killed.
        *("-drive", f"file={files.overlay},if=none,id=disk,format=qcow2,cache=unsafe"),
        *("-device", "virtio-blk-pci,drive=disk,bus=pcie.0,addr=0x4"),
        *(
            "-netdev",
            f"user,id=mgmt,dhcpstart={machine.mgmt_ip},hostfwd=tcp:127.0.0.1:{ssh_port}-{machine.mgmt_ip}:22",
        ),
        *("-device", f"virtio-net-pci,netdev=mgmt,mac={machine.mgmt_mac},bus=pcie.0,addr=0x3,romfile="),
        *("-device", "virtio-rng-pci,bus=pcie.0,addr=0x5"),
        *(
            "-chardev",
            f"socket,id=console,path={files.console},server=on,wait=off,logfile={files.console_log},logappend=on",
        ),
        *("-serial", "chardev:console"),
        *("-qmp", f"unix:{files.monitor},server=on,wait=off"),
        *("-qtest", f"unix:{files.test_port},server=on,wait=off", "-qtest-log", "none"),
    ]
    for credential in sorted(files.credentials.iterdir()):
        given += ["-smbios", f"type=11,path={credential}"]
    for numa in range(NUMA_NODES):
        cpus = f"{numa * per_node}-{(numa + 1) * per_node - 1}"
        given += ["-object", f"memory-backend-ram,id=ram{numa},size={MEMORY_MIB // NUMA_NODES}M"]
        given += ["-numa", f"node,nodeid={numa},memdev=ram{numa},cpus={cpus}"]
    return [*given, *nics]


def boot_from(machine: Machine, image: Image, loader: Path | None, accelerator: Accelerator) -> list[str]:
    """Boot the kernel of the image, or from the disk of a boot loader (lab/qemu/boot_loader.py)."""
    if loader is not None:
        # The order decides the disks' names: Linux names them by their addresses.
        return [
            *("-drive", f"file={loader},if=none,id=loader,format=raw,readonly=on"),
            *("-device", "virtio-blk-pci,drive=loader,bus=pcie.0,addr=0x6,bootindex=0"),
        ]
    command_line = [
        "root=/dev/vda rw console=ttyS0 intel_iommu=on iommu=pt",
        f"systemd.hostname={machine.name} systemd.machine_id={machine.machine_id}",
        *accelerator.kernel,
    ]
    return [*("-kernel", str(image.kernel), "-initrd", str(image.initrd)), *("-append", " ".join(command_line))]


def nic_between(nic: Nic, mine: Path, theirs: Path) -> list[str]:
    """A NIC on an expander bus of its NUMA node. It receives at the socket ``mine``, and sends to ``theirs``."""
    return [
        *("-device", f"pxb-pcie,id=pxb-{nic.name},bus=pcie.0,bus_nr={nic.bus},numa_node={nic.numa_node}"),
        *("-device", f"pcie-root-port,id=port-{nic.name},bus=pxb-{nic.name},chassis={nic.slot},slot={nic.slot}"),
        # Datagrams: neither node waits for the other, and either may stop and start.
        *("-netdev", f"dgram,id={nic.name},local.type=unix,local.path={mine},remote.type=unix,remote.path={theirs}"),
        *("-device", f"igb,netdev={nic.name},bus=port-{nic.name},mac={nic.mac},multifunction=on,romfile="),
    ]
