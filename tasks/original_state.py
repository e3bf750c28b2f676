"""Records the node's state before its first deploy. deploys/remove.py restores it.

/var/lib/trackbed/before  the number of VFs of each PF, whether irqbalance was enabled and running, which packages were held,
                          and which of the folders existed that Trackbed's files need
"""

from __future__ import annotations

from pathlib import PurePosixPath

from attrs import field, frozen
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.report.names import STATE_FOLDER
from tasks.common import units
from tasks.common.commands import Commands, script
from tasks.common.facts import FactBase
from tasks.common.texts import PUT
from tasks.drivers.gpu_driver import services
from tasks.host import irqbalance
from tasks.kubernetes import kubelet, labels
from tasks.packages import holds

PATH = f"{STATE_FOLDER}/before"

_DROP_INS = tuple(f"{units.FOLDER}/{places.unit}.d/{kubelet.NAME}" for places in kubelet.DISTRIBUTIONS.values())
_IN_FOLDERS = (labels.NFD, labels.DROP_IN, irqbalance.DROP_IN, irqbalance.SCRIPT, services.DROP_IN, *_DROP_INS)
_EVERYWHERE = {"/", "/etc", "/usr", "/usr/local", "/etc/systemd", units.FOLDER}
_PARENTS = {str(parent) for path in _IN_FOLDERS for parent in PurePosixPath(path).parents} - _EVERYWHERE
FOLDERS = sorted(_PARENTS, key=lambda folder: (-len(folder), folder))
"""Folders that Trackbed's files may create, the deepest first.

One that existed before stays, even if it is empty: NFD, for example, watches its own.
"""


@frozen
class OriginalVfs:
    """A PF's ``count`` of VFs (sriov_numvfs), and whether new VFs get a driver at once (sriov_drivers_autoprobe)."""

    count: int
    autoprobe: bool


@frozen
class OriginalState:
    """``vfs`` by PCI address. ``irqbalance``: enabled, and active; None if there is no such service.

    ``held``: the packages that were held. ``folders``: those of FOLDERS that existed.
    """

    vfs: dict[str, OriginalVfs] = field(factory=dict)
    irqbalance: tuple[bool, bool] | None = None
    held: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()


_STATE = """
state() {
  for folder in FOLDERS; do if [ -d "$2$folder" ]; then echo "folder $folder"; fi; done
  for device in "$2"/sys/bus/pci/devices/*; do
    if [ -r "$device/sriov_numvfs" ]; then
      echo "vfs ${device##*/} $(cat "$device/sriov_numvfs") $(cat "$device/sriov_drivers_autoprobe")"
    fi
  done
  enabled=$(systemctl is-enabled "$1" 2>/dev/null || true)
  if [ -n "$enabled" ]; then echo "irqbalance $enabled $(systemctl is-active "$1" || true)"; fi
  holds "$2" | sed 's/^/held /'
}
""".replace("FOLDERS", " ".join(FOLDERS))
STATE = holds.HOLDS + _STATE
"""A shell function that prints the state. Its arguments are irqbalance's unit and the root folder."""

_RECORD = (
    PUT
    + STATE
    + """
if [ -e "$3" ]; then exit 0; fi
mkdir -p "$(dirname "$3")"
state "$1" "$2" > "$3.new"
put "$3.new" "$3"
"""
)


class Recorded(FactBase[OriginalState | None]):
    """The recorded state; None if nothing is recorded yet."""

    shell = 'if [ -e "$1" ]; then echo here; cat "$1"; fi'
    words = (PATH,)

    def process(self, output: list[str]) -> OriginalState | None:
        """Parse the lines after `here`.

        :raises ValueError: it is not there.
        """
        if output[0] != "here":
            raise ValueError("it does not begin with 'here'")
        return parse(output[1:])


class Current(FactBase[OriginalState]):
    """The same state as it is now."""

    shell = f'{STATE}\nstate "$1" "$2"'
    words = (irqbalance.UNIT, "")

    def process(self, output: list[str]) -> OriginalState:
        """Parse all lines."""
        return parse(output)


def parse(lines: list[str]) -> OriginalState:
    """Parse lines such as `vfs 0000:21:00.0 0 1`, `irqbalance enabled active`, `held linux-image-amd64`."""
    words = [line.split() for line in lines]
    service = next((line for line in words if line[0] == "irqbalance"), None)
    return OriginalState(
        {line[1]: OriginalVfs(int(line[2]), line[3] == "1") for line in words if line[0] == "vfs"},
        (service[1] == "enabled", service[2] == "active") if service else None,
        frozenset(line[1] for line in words if line[0] == "held"),
        frozenset(line[1] for line in words if line[0] == "folder"),
    )


def record() -> None:
    """Record the state before the first deploy changes anything."""
    write(name="Original state")


@operation()
def write() -> Commands:
    """Write the file if it does not exist, and the notes that an interrupted deploy did not."""
    yield from holds.finish()
    if host.get_fact(Recorded) is not None:
        host.noop("the original state is recorded")
        return
    yield script(_RECORD, irqbalance.UNIT, "", PATH)
