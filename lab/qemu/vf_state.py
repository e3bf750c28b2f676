"""Saves what QEMU leaves out of a snapshot: the configuration space and the MSI-X table of each VF.

QEMU saves an igb card with its VFs' rings and registers, but it restores the VFs as after a reset: without bus mastering and
interrupts, while the guest still has both on. So both are read before savevm and written after loadvm, while the machine is
stopped. QEMU's test port reads and writes the same memory as a CPU.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import attrs

from lab.errors import LabError
from lab.hardware import VFS_PER_NIC, Machine
from lab.qemu.connection import connection

# q35 with SeaBIOS puts PCI configuration space here.
ECAM = 0xB0000000
COMMAND = 0x04
MSIX_CONTROL = 0x72
DEVICE_CONTROL = 0xA8
SRIOV_CONTROL = 0x168
SRIOV_NUM_VFS = 0x170
SRIOV_BAR3 = 0x190
VF_BAR3_SIZE = 0x4000
MSIX_DWORDS = 3 * 4

TIMEOUT_S = 30

# Width and address, such as w:0xb2180004, to value. They must be written in this order.
State = Mapping[str, int]


@attrs.frozen
class Port:
    """A connection to QEMU's qtest server, its test port."""

    _lines: TextIO

    def ask(self, *words: str) -> str:
        """Send one command and return what follows its OK."""
        self._lines.write(" ".join(words) + "\n")
        self._lines.flush()
        answer = self._lines.readline().split()
        if answer[:1] != ["OK"]:
            raise LabError(f"QEMU's test port refused {' '.join(words)}: {' '.join(answer)}")
        return answer[1] if len(answer) > 1 else ""

    def read(self, width: str, address: int) -> int:
        """Read a word ("w") or a double word ("l")."""
        mask = 0xFFFF if width == "w" else 0xFFFFFFFF
        return int(self.ask(f"read{width}", hex(address)), 16) & mask


def save(path: Path, machine: Machine) -> dict[str, int]:
    """Read the state of all VFs of a stopped machine."""
    with connection(path, TIMEOUT_S) as lines:
        port = Port(lines)
        state: dict[str, int] = {}
        for nic in machine.nics:
            pf = _config(nic.pci)
            if not port.read("w", pf + SRIOV_CONTROL) & 1:
                continue
            table = port.read("l", pf + SRIOV_BAR3) & ~0xF | port.read("l", pf + SRIOV_BAR3 + 4) << 32
            count = min(port.read("w", pf + SRIOV_NUM_VFS), VFS_PER_NIC)
            for number, vf in enumerate(nic.vf_pcis[:count]):
                for place in _places(vf, table + number * VF_BAR3_SIZE):
                    state[place] = port.read(*_split(place))
        return state


def load(path: Path, state: State) -> None:
    """Write the state back to a stopped machine."""
    with connection(path, TIMEOUT_S) as lines:
        port = Port(lines)
        for key, value in state.items():
            width, address = _split(key)
            port.ask(f"write{width}", hex(address), hex(value))


def _places(vf: str, table: int) -> Sequence[str]:
    config = _config(vf)
    entries = [f"l:{table + 4 * number:#x}" for number in range(MSIX_DWORDS)]
    # Interrupts come last: a vector that is unmasked before its message is written would send an interrupt to a wrong address.
    command, device, msix = (f"w:{config + word:#x}" for word in (COMMAND, DEVICE_CONTROL, MSIX_CONTROL))
    return [command, device, *entries, msix]


def _split(key: str) -> tuple[str, int]:
    width, address = key.split(":")
    return width, int(address, 16)


def _config(pci: str) -> int:
    _, bus, rest = pci.split(":")
    device, function = rest.split(".")
    return ECAM + (int(bus, 16) << 20 | int(device, 16) << 15 | int(function) << 12)
