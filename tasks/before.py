"""What a node was before Trackbed first touched it: written down once, for deploys/remove.py.

/var/lib/trackbed/before  the number of VFs of each PF, how irqbalance was set up, which packages were held,
                          and which of the folders there were that files of ours bring
"""

from __future__ import annotations

from pathlib import PurePosixPath

from attrs import field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks import irqbalance, kubelet, labels
from tasks.common.commands import Commands, script
from tasks.packages import vendor_repository

PATH = "/var/lib/trackbed/before"

_DROP_INS = tuple(f"{kubelet.UNITS}/{places.unit}.d/{kubelet.NAME}" for places in kubelet.DISTRIBUTIONS.values())
_IN_FOLDERS = (labels.NFD, labels.DROP_IN, irqbalance.DROP_IN, irqbalance.SCRIPT, *_DROP_INS)
_EVERYWHERE = {"/", "/etc", "/usr", "/usr/local", "/etc/systemd", kubelet.UNITS}
_PARENTS = {str(parent) for path in _IN_FOLDERS for parent in PurePosixPath(path).parents} - _EVERYWHERE
FOLDERS = sorted(_PARENTS, key=lambda folder: (-len(folder), folder))
"""Folders that may come with files of ours, the deepest first. An empty one may be somebody's: NFD watches its own."""


@frozen
class Vfs:
    """Of a PF: ``count`` VFs (sriov_numvfs), and whether new ones get a driver at once (sriov_drivers_autoprobe)."""

    count: int
    autoprobe: bool


@frozen
class Before:
    """``vfs`` by PCI address. ``irqbalance``: enabled and active, None where there is no such service.

    ``folders``: those of FOLDERS that were there.
    """

    vfs: dict[str, Vfs] = field(factory=dict)
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
  if command -v apt-mark >/dev/null; then apt-mark showhold | sed 's/^/held /'; fi
  locks "$2" | sed 's/^/held /'
}
""".replace("FOLDERS", " ".join(FOLDERS))
STATE = vendor_repository.LOCKS + _STATE
"""A shell function: the state, a line for each thing; its arguments are irqbalance's unit and the root folder."""

_REMEMBER = (
    STATE
    + """
if [ -e "$3" ]; then exit 0; fi
mkdir -p "$(dirname "$3")"
state "$1" "$2" > "$3.new"
mv -T "$3.new" "$3"
"""
)


class Remembered(FactBase[Before | None]):
    """What was written down; None: nothing yet."""

    def command(self) -> StringCommand:
        """Read the file; `here` says that it is there, for it may be empty."""
        return script('if [ -e "$1" ]; then echo here; cat "$1"; fi', PATH)

    def process(self, output: list[str]) -> Before | None:
        """Lines of NAME and values."""
        return parse(output[1:])


class Present(FactBase[Before]):
    """The same things as they are now."""

    def command(self) -> StringCommand:
        """One script."""
        return script(f'{STATE}\nstate "$1" "$2"', irqbalance.UNIT, "")

    def process(self, output: list[str]) -> Before:
        """Lines of NAME and values."""
        return parse(output)


def parse(lines: list[str]) -> Before:
    """Lines such as `vfs 0000:21:00.0 0 1`, `irqbalance enabled active`, `held linux-image-amd64`."""
    words = [line.split() for line in lines]
    service = next((line for line in words if line[0] == "irqbalance"), None)
    return Before(
        {line[1]: Vfs(int(line[2]), line[3] == "1") for line in words if line[0] == "vfs"},
        (service[1] == "enabled", service[2] == "active") if service else None,
        frozenset(line[1] for line in words if line[0] == "held"),
        frozenset(line[1] for line in words if line[0] == "folder"),
    )


def remember() -> None:
    """Write it down, before anything else is done to the node."""
    write(name="What the node was")


@operation()
def write() -> Commands:
    """Once, and never again."""
    if host.get_fact(Remembered) is not None:
        host.noop("it is written down")
        return
    yield script(_REMEMBER, irqbalance.UNIT, "", PATH)
