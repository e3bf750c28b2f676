"""The names of VFs' netdevs, restored to udev's after a container has renamed them.

When a container's network namespace ends, its netdevs return to the host under the name that they had there, or as
``dev<ifindex>`` if that name is taken. udev does not rename a netdev that somebody has named (seen on 6.1 with systemd 252:
``ID_NET_NAME=net1`` beside ``ID_NET_NAME_SLOT=ens1f0v0``). udev's naming policy depends on the host; the PF's name shows which
rule applies. VFs with a .link file of their own are left alone.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

from attrs import evolve, frozen

from agent.hardware.functions import PCI, driver, has_netdev, ifindex, link_of, netdev, port_netdevs
from agent.hardware.sysfs import names_in
from agent.hardware.udev import udev_entry
from agent.kinds import links
from agent.machine import IFNAMSIZ, Files, Machine
from agent.report.records import Change, Disruption
from agent.report.target import vf_index, vf_target
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "vf_names"
AFTER = ("bindings",)

LINK_FILE = "ID_NET_LINK_FILE"
# systemd.link(5), NamePolicy=: what udev derives from the device alone, in the order of its default policy.
RULES = ("ID_NET_NAME_FROM_DATABASE", "ID_NET_NAME_ONBOARD", "ID_NET_NAME_SLOT", "ID_NET_NAME_PATH", "ID_NET_NAME_MAC")


@frozen
class Name:
    """A netdev's name, and the ``usual`` one: what udev would name it by the rule that named its PF (None: no name)."""

    current: str | None
    usual: str | None
    up: bool


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Name]]:
    """The names of each PF's VFs, by target; a netdev outside the host's network namespace has none."""
    names = {}
    for address, functions in functions_in_scope(machine.files, want, scope).items():
        vfs = {target: vf for target, vf in functions.items() if target != address}
        rule, link_file = _naming(machine.files, address) if vfs else ("", "")
        names[address] = {target: _name(machine, vf, rule, link_file) for target, vf in vfs.items()}
    return names


def _naming(files: Files, address: str) -> tuple[str, str]:
    """The rule that named a PF's netdev, and the .link file; empty if no rule did.

    udev names no netdev that only configures VFs (Chelsio's, ARPHRD_NONE). The card's ports belong to another of its functions.
    """
    is_its_own = has_netdev(files, address, driver(files, address))
    card = address.rpartition(".")[0] + "."
    functions = [address] if is_its_own else [each for each in names_in(files, PCI) if each.startswith(card)]
    for function in functions:
        for name in port_netdevs(files, function):
            properties = _properties(files, ifindex(files, name))
            for rule in RULES:
                if _property(properties, rule) == name:
                    return rule, _property(properties, LINK_FILE)
    return "", ""


def _name(machine: Machine, vf: str, rule: str, link_file: str) -> Name:
    name = netdev(machine.files, vf)
    link = machine.netlink.link(name) if name else None
    if link is None:
        return Name(None, None, False)
    properties = _properties(machine.files, link.ifindex) if rule else ""
    usual = _property(properties, rule) if _property(properties, LINK_FILE) == link_file else ""
    return Name(link.name, usual if 0 < len(usual) < IFNAMSIZ else None, link.up)


def _properties(files: Files, index: int) -> str:
    """A netdev's entry in udev's database, with a line end before and after each line, as :func:`_property` needs it."""
    return f"\n{udev_entry(files, index)}\n"


def _property(properties: str, name: str) -> str:
    """One property, or empty. The text is searched, not parsed: each of a thousand netdevs has dozens of properties."""
    return properties.partition(f"\nE:{name}=")[2].partition("\n")[0]


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The VFs that do not have their usual name. To rename a netdev that is up may take its link down."""
    changes = []
    for address, nic in links.usable(want, have):
        names: Mapping[str, Name] = have[NAME].get(address, {})
        for index in range(nic.vf_count() or 0):
            target = vf_target(address, index)
            name = names.get(target)
            if name is None or name.current is None or name.usual in (None, name.current):
                continue
            disruption = Disruption.LINK_FLAP if name.up else Disruption.NONE
            skip_if_owned = nic.vf(index).owner != "trackbed"
            changes.append(
                Change(NAME, target, "name", name.current, name.usual, disruption, skip_if_owned=skip_if_owned)
            )
    return _in_order(changes)


def _in_order(changes: list[Change]) -> list[Change]:
    """Each name is freed before it is given. Where VFs have each other's names, one is called otherwise until the next plan."""
    ordered: list[Change] = []
    while changes:
        held = {change.before for change in changes}
        free = [change for change in changes if change.after not in held]
        if not free:
            change = changes[0]
            name = f"free{vf_index(change.target)}"
            free = [evolve(change, after=name, note=f"another VF has the name {change.after}")]
        ordered += free
        targets = {change.target for change in free}
        changes = [change for change in changes if change.target not in targets]
    return ordered


def transients(machine: Machine, want: Wanted, change: Change) -> list[Change]:
    """A link that is up may be taken down; vf_links brings it up again."""
    if change.disruption < Disruption.LINK_FLAP:
        return []
    return [Change("vf_links", change.target, "state", "up", "down")]


def apply(machine: Machine, change: Change) -> None:
    """Rename the netdev. Only if the kernel refuses that while the link is up (EBUSY, before Linux 6.2), take it down first.

    vf_links brings it up again, also if renaming fails. The kernel is asked (dev_change_name, net/core/dev.c): its version
    does not tell which changes a distribution has added.
    """
    link = link_of(machine, change.target)
    name = str(change.after)
    other = machine.netlink.link(name)
    if other is not None and other.ifindex != link.ifindex:
        # Checked before the link goes down: otherwise each retry would take it down.
        raise OSError(errno.EEXIST, links.who_is_called(machine, name, "rename that first"))
    try:
        machine.netlink.rename(link.ifindex, name)
    except OSError as error:
        if error.errno != errno.EBUSY or not link.up:
            raise
        machine.netlink.set_link(link.ifindex, up=False)
        machine.netlink.rename(link.ifindex, name)
