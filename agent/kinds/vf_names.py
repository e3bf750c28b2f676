"""The names of VFs' netdevs: those that udev gave them, which a VF loses in the network namespace of a container.

When that namespace dies its netdev comes back as it was called there, or as ``dev<ifindex>`` if that name is taken, and udev
keeps a name that somebody gave (seen on 6.1 with systemd 252: ``ID_NET_NAME=net1`` beside ``ID_NET_NAME_SLOT=ens1f0v0``). Which
of udev's names is the right one is a policy of the host's: the PF, which goes nowhere, shows it. VFs that have a .link file of
their own are left alone.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

from attrs import frozen

from agent.hardware.functions import link_of, netdev
from agent.hardware.sysfs import read_or
from agent.kinds import links
from agent.machine import Files, Link, Machine
from agent.report.records import Change, Disruption
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "vf_names"
AFTER = ("bindings",)
UNKNOWN_UNTIL: tuple[str, ...] = ()
REACH = "function"

DATABASE = "/run/udev/data"
LINK_FILE = "ID_NET_LINK_FILE"
# A name that is longer can only be an alternative one.
IFNAMSIZ = 16
# systemd.link(5), NamePolicy=: what udev derives from the device alone, in the order of its default policy.
RULES = ("ID_NET_NAME_FROM_DATABASE", "ID_NET_NAME_ONBOARD", "ID_NET_NAME_SLOT", "ID_NET_NAME_PATH", "ID_NET_NAME_MAC")


@frozen
class Name:
    """What a netdev is called, and what udev would call it by the rule that its PF is called by (None: nothing)."""

    current: str | None
    usual: str | None
    up: bool


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Name]]:
    """The names of each PF's VFs, by target; one that is not in the host's namespace has none."""
    found = {}
    for address, functions in functions_in_scope(machine.files, want, scope).items():
        pf = want.nics[address].function.link
        told = _properties(machine.files, pf) if pf else ""
        rule = next((rule for rule in RULES if pf and _property(told, rule) == pf.name), "")
        vfs = ((target, vf) for target, vf in functions.items() if target != address)
        found[address] = {target: _name(machine, vf, rule, _property(told, LINK_FILE)) for target, vf in vfs}
    return found


def _name(machine: Machine, vf: str, rule: str, link_file: str) -> Name:
    name = netdev(machine.files, vf)
    link = machine.netlink.link(name) if name else None
    if link is None:
        return Name(None, None, False)
    told = _properties(machine.files, link)
    usual = _property(told, rule) if rule and _property(told, LINK_FILE) == link_file else ""
    return Name(link.name, usual if 0 < len(usual) < IFNAMSIZ else None, link.up)


def _properties(files: Files, link: Link) -> str:
    """What udev keeps of a netdev: its properties are on lines ``E:NAME=value``."""
    return f"\n{read_or(files, f'{DATABASE}/n{link.ifindex}', '')}\n"


def _property(told: str, name: str) -> str:
    """One of these properties; empty if there is none. There are dozens, on each of a thousand netdevs."""
    return told.partition(f"\nE:{name}=")[2].partition("\n")[0]


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The VFs that are not called what udev would call them. Before Linux 6.2 a netdev that is up cannot be renamed (EBUSY)."""
    changes = []
    for address, nic in links.usable(want, have):
        names: Mapping[str, Name] = have[NAME].get(address, {})
        for index in range(nic.vf_count() or 0):
            target = f"{address}#{index}"
            name = names.get(target)
            if name is None or name.current is None or name.usual in (None, name.current):
                continue
            disruption = Disruption.LINK_FLAP if name.up else Disruption.NONE
            skip_if_owned = nic.vf(index).owner != "trackbed"
            changes.append(
                Change(NAME, target, "name", name.current, name.usual, disruption, skip_if_owned=skip_if_owned)
            )
    return changes


def transients(change: Change) -> list[Change]:
    """A link that is up is taken down, and stays so until the next kind brings it up."""
    if change.disruption < Disruption.LINK_FLAP:
        return []
    return [Change("vf_links", change.target, "state", "up", "down")]


def apply(machine: Machine, change: Change) -> None:
    """Rename the netdev, with its link down; bringing it up is the next kind's business, whether this works or not."""
    link = link_of(machine, change.target)
    name = str(change.after)
    other = machine.netlink.link(name)
    if other is not None and other.ifindex != link.ifindex:
        # Before the link goes down: this may be tried again and again.
        raise OSError(errno.EEXIST, f"another netdev is called {name}; rename that first")
    if link.up:
        machine.netlink.set_link(link.ifindex, up=False)
    machine.netlink.rename(link.ifindex, name)
