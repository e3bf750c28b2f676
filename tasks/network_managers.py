"""NetworkManager and systemd-networkd keep off VFs: they would take a VF down, rename it or ask for an address on it.

A VF is known by its PCI function's link to its PF, whatever it is called and whatever drives it (mlx5_core drives PFs and VFs
alike): a udev rule marks it. NetworkManager(8), "UDEV PROPERTIES": NM_UNMANAGED. systemd.network(5): Property=, since systemd
243; an older networkd would ignore that key and match every interface, so it is left alone. A VF that is to be managed all the
same needs a rule of a later name that sets both properties to 0.
"""

from __future__ import annotations

from io import StringIO

from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host
from pyinfra.operations import files

from agent.spec.node import NodeSpec
from tasks.common.commands import Commands, script

RULE = "/etc/udev/rules.d/70-trackbed-vfs.rules"
NETWORK = "/etc/systemd/network/10-trackbed-vfs.network"

HEADER = "# Written by Trackbed; changes here are overwritten.\n"
RULE_TEXT = (
    HEADER + 'SUBSYSTEM=="net", ACTION!="remove", TEST=="device/physfn", ENV{NM_UNMANAGED}="1", ENV{TRACKBED_VF}="1"\n'
)
NETWORK_TEXT = HEADER + "[Match]\nProperty=TRACKBED_VF=1\n\n[Link]\nUnmanaged=yes\n"

NETWORKD = "systemd-networkd"
NETWORK_MANAGER = "NetworkManager"

# networkctl reload came with systemd 244.
_MANAGERS = """
for program in "$1"/usr/sbin/NetworkManager "$1"/usr/bin/NetworkManager; do
  if [ -x "$program" ]; then echo NetworkManager; break; fi
done
for program in "$1"/usr/lib/systemd/systemd-networkd "$1"/lib/systemd/systemd-networkd; do
  if [ -x "$program" ]; then
    systemctl --version | { read -r _ version _; [ "${version%%[!0-9]*}" -lt 244 ] || echo systemd-networkd; }
    break
  fi
done
"""


class NetworkManagers(FactBase[list[str]]):
    """Which of the two are installed on the node, and can be told to keep off."""

    default = list

    def command(self) -> StringCommand:
        """Look for their programs, where the distributions have them."""
        return script(_MANAGERS, "")

    def process(self, output: list[str]) -> list[str]:
        """One name a line."""
        return output


_UNMARKED = """
for link in "$1"/sys/class/net/*/device/physfn; do
  [ -e "$link" ] || continue
  netdev=${link%/device/physfn}
  grep -qsx E:TRACKBED_VF=1 "$1/run/udev/data/n$(cat "$netdev/ifindex")" || basename "$netdev"
done
"""


class UnmarkedVfs(FactBase[list[str]]):
    """The VFs' netdevs that udev saw before the rule was there."""

    default = list

    def command(self) -> StringCommand:
        """Look into udev's database."""
        return script(_UNMARKED, "")

    def process(self, output: list[str]) -> list[str]:
        """One netdev a line."""
        return output


@deploy("Network managers")
def keep_off_vfs(spec: NodeSpec) -> None:
    """Tell those that are installed; where none is, or no NIC of the spec has VFs, there are no files."""
    wanted = any(nic.vfs is not None and nic.vfs.count for nic in spec.nics)
    managers = host.get_fact(NetworkManagers) if wanted else []
    rule = _file("Mark VFs", RULE, RULE_TEXT, bool(managers))
    network = _file("networkd keeps off VFs", NETWORK, NETWORK_TEXT, NETWORKD in managers)
    tell(name="VFs that are there", managers=managers, changed=(rule, network))


def _file(name: str, path: str, text: str, present: bool) -> OperationMeta:
    if present:
        return files.put(name=name, src=StringIO(text), dest=path, mode="644")
    return files.file(name=name, path=path, present=False)


# A change event renames nothing, and takes nothing down.
_TELL = """
udevadm control --reload
for netdev; do udevadm trigger --action=change "/sys/class/net/$netdev"; done
udevadm settle --timeout=30 || true
if systemctl --quiet is-active systemd-networkd; then networkctl reload; fi
"""


@operation()
def tell(managers: list[str], changed: tuple[OperationMeta, ...]) -> Commands:
    """Let udev look again at the VFs that it has not marked, and networkd at its files."""
    unmarked = host.get_fact(UnmarkedVfs) if managers else []
    if not unmarked and not any(_changes(made) for made in changed):
        host.noop("network managers keep off VFs")
        return
    yield script(_TELL, *unmarked)


def _changes(made: OperationMeta) -> bool:
    return made.did_change() if made.is_complete() else made.will_change
