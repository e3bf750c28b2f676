"""Makes NetworkManager and systemd-networkd ignore VFs: they would set a VF down, rename it or request an address for it.

A udev rule marks VFs by their PCI function's link to the PF, which does not depend on name or driver (mlx5_core drives PFs
and VFs). NetworkManager reads the mark NM_UNMANAGED (NetworkManager(8), "UDEV PROPERTIES"). networkd matches it by Property=
(systemd.network(5)), since systemd 243; an older networkd would ignore that key and match every interface, so it gets no
file. Of the files that match, networkd uses the first one by name, and netplan's are 10-netplan-ID.network. To have a VF
managed all the same, add a udev rule with a later name that sets both properties to 0.

networkd also removes routing rules that are not its own, whenever it starts. If the spec gives addresses, a file tells it to
leave them (ManageForeignRoutingPolicyRules=, since systemd 249). It reads that when it starts, so nothing is restarted.
"""

from __future__ import annotations

from pyinfra.api.deploy import deploy
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.spec.node import NodeSpec
from tasks.common.commands import Commands, script
from tasks.common.facts import Lines
from tasks.common.texts import HEADER, Texts, replace, written

RULE = "/etc/udev/rules.d/70-trackbed-vfs.rules"
NETWORK = "/etc/systemd/network/00-trackbed-vfs.network"
NETWORK_OF_1_0_0 = "/etc/systemd/network/10-trackbed-vfs.network"
NETWORKD_CONF = "/etc/systemd/networkd.conf.d/10-trackbed.conf"


RULE_TEXT = (
    HEADER + 'SUBSYSTEM=="net", ACTION!="remove", TEST=="device/physfn", ENV{NM_UNMANAGED}="1", ENV{TRACKBED_VF}="1"\n'
)
NETWORK_TEXT = HEADER + "[Match]\nProperty=TRACKBED_VF=1\n\n[Link]\nUnmanaged=yes\n"
NETWORKD_CONF_TEXT = HEADER + "[Network]\nManageForeignRoutingPolicyRules=no\n"

NETWORKD = "systemd-networkd"

# `networkctl reload` needs systemd 244.
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


class NetworkManagers(Lines):
    """Which of the two are installed, in a version that can ignore VFs."""

    shell = _MANAGERS


_UNMARKED = """
for link in "$1"/sys/class/net/*/device/physfn; do
  [ -e "$link" ] || continue
  netdev=${link%/device/physfn}
  grep -qs ^E:TRACKBED_VF= "$1/run/udev/data/n$(cat "$netdev/ifindex")" || basename "$netdev"
done
"""


class UnmarkedVfs(Lines):
    """The netdevs of VFs that udev has not marked, since it processed them before the rule existed. A mark of 0 is one, too."""

    shell = _UNMARKED


@deploy("Network managers")
def ignore_vfs(spec: NodeSpec) -> None:
    """Write the files for the installed managers; remove them if there is none, or if the spec has no VFs and no addresses.

    The mode `observe` leaves the files as they are: a manager that must ignore a VF takes its addresses away.
    """
    if spec.mode == "observe":
        return
    vfs = any(nic.vfs is not None and nic.vfs.count for nic in spec.nics)
    addresses = any(nic.addresses for nic in spec.nics)
    installed = host.get_fact(NetworkManagers) if vfs or addresses else []
    rules = NETWORKD_CONF_TEXT if addresses and NETWORKD in installed else ""
    written(name="networkd leaves rules", path=NETWORKD_CONF, text=rules)
    managers = installed if vfs else []
    want = {RULE: RULE_TEXT} if managers else {}
    if NETWORKD in managers:
        want[NETWORK] = NETWORK_TEXT
    mark(name="Mark VFs", want=want)


# A change event neither renames a netdev nor sets it down. The VFs are looked up here once more: while a boot's first pass
# creates VFs, udev renames their netdevs, and what it renames after the reload is marked by that event.
_APPLY = (
    """
udevadm control --reload
unmarked=$("""
    + _UNMARKED
    + """)
for netdev in $unmarked; do
  netdev="$1/sys/class/net/$netdev"
  udevadm trigger --action=change "$netdev" || [ ! -e "$netdev" ]
done
udevadm settle --timeout=30 || true
if systemctl --quiet is-active systemd-networkd; then networkctl reload; fi
"""
)


@operation()
def mark(want: dict[str, str]) -> Commands:
    """Write the files, make udev process the VFs that it has not marked, and networkd read its files again."""
    have = host.get_fact(Texts, paths=(RULE, NETWORK, NETWORK_OF_1_0_0))
    unmarked = host.get_fact(UnmarkedVfs) if want else []
    if have == want and unmarked:
        yield script(_APPLY, "")
    yield from replace(have, want, _APPLY, "")
