"""The netdevs of PFs: present, up, with the wanted MTU, queue length and alternative names.

They come before VFs, because a VF driver that is bound while its PF is down gets no MAC address. A PF's MTU is therefore also
lowered before that of its VFs. igb allows that (seen on 6.1): the VFs keep their larger MTU until they are set.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping

from attrs import evolve, frozen

from agent.driver_families import family_of, is_passed_through
from agent.hardware.bonds import is_ipoib
from agent.hardware.functions import NET, device_path, driver, has_netdev, ifindex_named, netdev, netdev_of, pci_of
from agent.hardware.sysfs import names_in
from agent.hardware.udev import initialised
from agent.kinds import Reading
from agent.machine import Files, Link, Machine
from agent.report.reasons import LOG_IF_LOADED
from agent.report.records import Change, Disruption, Value
from agent.report.target import is_vf
from agent.spec.nic import Nic, VfAttributes
from agent.state.scope import Scope, pfs_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

NAME = "links"
OTHER_WRITERS = ("NetworkManager", "systemd-networkd", "ifplugd", "netplan", "tuned", "cilium-agent", "aws-k8s-agent")

# Each alternative name is a field of its own, `altname NAME`, whose value is one of these.
ALTNAME = "altname "
PRESENT, ABSENT = "present", "absent"

UDEV_ENTRY = "udev entry"
"""The field of a netdev that udev has not initialised."""

UDEV_LATE = 30.0
"""After so many seconds the agent assumes that udev was stopped when the netdev appeared, and missed the kernel's event. A udev
that runs initialises a netdev within a second, and within some seconds while a node boots."""


@frozen
class LinkStatus:
    """The netdev of the function at ``pci``. ``ready``: udev has initialised it; before that its name may still change.

    ``has_netdev``: its driver creates a netdev that passes packets. Else ``link`` only serves to configure VFs.

    ``missing``: it has a driver that creates netdevs, and its netdev is in no network namespace that the agent can enter.
    ``only_rdma``: the same of a PF that has an RDMA device, and so need not have a netdev. It is read only if the spec has
    settings of a netdev for that PF. A VF's ``missing`` and ``only_rdma`` stay False where no other namespace can be
    searched.
    """

    pci: str
    driver: str | None
    link: Link | None
    ready: bool
    missing: bool = False
    only_rdma: bool = False
    has_netdev: bool = True


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, LinkStatus]]:
    """The netdev of each PF, by target."""
    return {address: {address: _status_of_pf(machine, address, want)} for address in pfs_in_scope(want, scope)}


def _status_of_pf(machine: Machine, pci: str, want: Wanted) -> LinkStatus:
    link_status = status(machine, pci)
    if not is_away(link_status):
        return link_status
    only_rdma = has_rdma(machine.files, pci)
    if only_rdma and not (_settings_of_netdev(want.nics[pci].nic, only_rdma) and machine.namespaces.searchable()):
        return link_status
    missing = pci not in machine.namespaces.holding([pci])
    return evolve(link_status, only_rdma=missing) if only_rdma else evolve(link_status, missing=missing)


def status(machine: Machine, pci: str) -> LinkStatus:
    """Read one function's netdev."""
    name = netdev(machine.files, pci)
    link = machine.netlink.link(name) if name else None
    ready = link is not None and initialised(machine.files, link.ifindex)
    bound = driver(machine.files, pci)
    return LinkStatus(pci, bound, link, ready, has_netdev=has_netdev(machine.files, pci, bound))


def is_away(link_status: LinkStatus) -> bool:
    """Whether a function has a driver that creates netdevs, and no netdev in the host's network namespace."""
    return link_status.link is None and link_status.driver is not None and link_status.has_netdev


def has_rdma(files: Files, pci: str) -> bool:
    """Whether a function has an RDMA device. Then it need not have a netdev.

    An InfiniBand function has one only with ib_ipoib.
    """
    return bool(names_in(files, f"{device_path(pci)}/infiniband"))


def usable(want: Wanted, have: Snapshot) -> list[tuple[str, WantedNic]]:
    """The wanted NICs whose VFs can be configured: the PF's netdev is there, and udev has initialised it.

    A VF that is created earlier finds its PF down and gets no MAC address.
    """
    statuses: Mapping[str, Mapping[str, LinkStatus]] = have[NAME]
    return [
        (address, nic)
        for address, nic in sorted(want.nics.items())
        if (status := statuses.get(address, {}).get(address)) and (status.ready or not status.has_netdev)
    ]


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The PFs' netdevs that differ."""
    changes: list[Change] = []
    for address, nic in sorted(want.nics.items()):
        link_status: LinkStatus | None = have[NAME].get(address, {}).get(address)
        changes += _plan_without_netdev(address, nic.nic, link_status)
        changes += plan_link(NAME, address, link_status, nic.nic)
        if link_status is not None and link_status.link is not None and link_status.ready:
            missing = (
                name for name in nic.nic.altnames if name not in (link_status.link.name, *link_status.link.altnames)
            )
            changes += [Change(NAME, address, f"{ALTNAME}{name}", ABSENT, PRESENT) for name in missing]
    return changes


_NEED_NETDEV = ("mtu", "txqueuelen", "altnames", "channels", "rings", "coalescing", "offloads", "napi", "addresses")


def _settings_of_netdev(nic: Nic, only_rdma: bool) -> list[str]:
    """The keys of a NIC that need a netdev.

    :param only_rdma: its driver is one of those that create netdevs: then RoCE is set only beside one.
    """
    given = [key for key in _NEED_NETDEV if getattr(nic, key) not in (None, ())]
    given += ["state"] if nic.state == "down" else []
    return [*given, "roce"] if only_rdma and nic.roce is not None else given


def _plan_without_netdev(address: str, nic: Nic, link_status: LinkStatus | None) -> Iterator[Change]:
    if link_status is None:
        return
    bound, only_rdma = link_status.driver, link_status.only_rdma
    family = family_of(bound)
    given = _settings_of_netdev(nic, only_rdma) if only_rdma or not link_status.has_netdev else []
    if given:
        creates = "has created" if only_rdma else "creates"
        settings = ", ".join(given)
        instead = "load ib_ipoib if it is InfiniBand" if only_rdma else "bind a network driver to it"
        if family.pfs_only_for_vfs:
            instead = "give them in `vfs`, for its VFs: the netdevs of the card's ports belong to another function"
        yield Change(
            NAME,
            address,
            "netdev",
            ABSENT,
            PRESENT,
            blocker=f"its driver {bound} {creates} no netdev for it, and NIC {nic.name} has settings of one: {settings}",
            remedy=f"remove these settings from the NIC, or {instead}",
            # While a virtual machine has the function, nothing is amiss.
            skip_if_owned=is_passed_through(bound),
        )


def plan_link(kind: str, target: str, link_status: LinkStatus | None, wanted: Nic | VfAttributes) -> list[Change]:
    """The changes of one netdev; none while it is in another network namespace, or if its driver creates none."""
    if link_status is not None and not link_status.has_netdev:
        return []
    if link_status is not None and is_away(link_status) and not link_status.missing:
        return []  # it is in another network namespace
    if link_status is None or link_status.link is None:
        return [_absent(kind, target, link_status)]
    if not link_status.ready:
        remedy = "see `udevadm settle` and `systemctl status systemd-udevd`"
        return [Change(kind, target, UDEV_ENTRY, None, PRESENT, remedy=remedy, grace_period=UDEV_LATE)]
    link = link_status.link
    mtu, state, txqueuelen = wanted.mtu, wanted.state, wanted.txqueuelen
    changes = []
    if mtu is not None and link.mtu != mtu:
        flaps = link.up and family_of(link_status.driver).mtu_flaps
        disruption = Disruption.LINK_FLAP if flaps else Disruption.NONE
        blocker = remedy = ""
        if 0 < link.max_mtu < mtu:
            blocker = f"its netdev {link.name} has an MTU of {link.max_mtu} at most, the spec wants {mtu}"
            remedy = f"lower mtu{', or detach the XDP program that limits it (`ip link`)' if link.xdp else ''}"
        changes.append(Change(kind, target, "mtu", link.mtu, mtu, disruption, blocker=blocker, remedy=remedy))
    if txqueuelen is not None and link.txqueuelen != txqueuelen:
        changes.append(Change(kind, target, "txqueuelen", link.txqueuelen, txqueuelen))
    if state is not None and link.up != (state == "up"):
        disruption = Disruption.NONE if state == "up" else Disruption.LINK_FLAP
        changes.append(Change(kind, target, "state", "up" if link.up else "down", state, disruption))
    return changes


def _absent(kind: str, target: str, link_status: LinkStatus | None) -> Change:
    bound = link_status.driver if link_status else None
    blocker = f"its netdev is not there (driver: {bound or 'none'})"
    # Of the PFs of a ConnectX with Socket Direct one has the netdev (Documentation/networking/multi-pf-netdev.rst).
    shared = "" if is_vf(target) else "take it out of the spec if another PF has its port's netdev (Socket Direct), "
    remedy = (
        f"load the driver that creates its netdev; {LOG_IF_LOADED}"
        if bound is None
        else f"load its RDMA driver and ib_ipoib if it is InfiniBand, {shared}else see the kernel log (dmesg) for the "
        "driver's error"
    )
    return Change(kind, target, "netdev", ABSENT, PRESENT, blocker=blocker, remedy=remedy)


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """A PF's MTU, state or queue length, or whether it still has an alternative name that the agent added."""
    if kept.field.startswith(ALTNAME):
        return _altname_reading(machine, want, kept)
    nic = want.nics.get(kept.target)
    return link_reading(have[NAME].get(kept.target, {}).get(kept.target), nic.nic, kept) if nic is not None else None


def link_reading(
    link_status: LinkStatus | None, wanted: Nic | VfAttributes, kept: Change, skip_if_owned: bool = False
) -> Reading | None:
    """One netdev's MTU, state or queue length; None while it is not there."""
    if link_status is None or link_status.link is None or not link_status.ready:
        return None
    link = link_status.link
    values: dict[str, Value] = {"mtu": link.mtu, "txqueuelen": link.txqueuelen, "state": "up" if link.up else "down"}
    if kept.field not in values:
        return None
    costs = {"state": True, "mtu": family_of(link_status.driver).mtu_flaps}
    disruption = Disruption.LINK_FLAP if link.up and costs.get(kept.field, False) else Disruption.NONE
    return Reading(values[kept.field], getattr(wanted, kept.field) is not None, disruption, skip_if_owned)


def _altname_reading(machine: Machine, want: Wanted, kept: Change) -> Reading | None:
    """No two netdevs have one name: it is taken from a netdev, whichever NIC that is now, once the spec gives it to another."""
    nic, name = want.nics.get(kept.target), kept.field.removeprefix(ALTNAME)
    moves = any(name in other.nic.altnames for address, other in want.nics.items() if address != kept.target)
    if nic is None and not moves:
        return None
    link_status = status(machine, pci_of(machine.files, kept.target))
    if link_status.link is None or not link_status.ready:
        return None
    now = PRESENT if name in link_status.link.altnames else ABSENT
    return Reading(now, nic is not None and name in nic.nic.altnames)


def arranged(changes: list[Change]) -> list[Change]:
    """An alternative name may move: it is taken from the one netdev before the other one gets it."""
    return sorted(changes, key=lambda change: not change.original)


def apply(machine: Machine, change: Change) -> None:
    """Set one value of a netdev. It is looked up by its PCI address again, since names and indexes change."""
    name = netdev_of(machine.files, change.target)
    index = ifindex_named(machine.files, name)
    if change.field == "mtu":
        _set_mtu(machine, name, index, change.number)
    elif change.field == "txqueuelen":
        machine.netlink.set_link(index, txqueuelen=change.number)
    elif change.field.startswith(ALTNAME) and change.after == PRESENT:
        _add_altname(machine, index, change.field.removeprefix(ALTNAME))
    elif change.field.startswith(ALTNAME):
        machine.netlink.remove_altname(index, change.field.removeprefix(ALTNAME))
    elif change.field == UDEV_ENTRY:
        # This write makes the kernel send the netdev's event again: Documentation/ABI/testing/sysfs-uevent.
        machine.files.write(f"{NET}/{name}/uevent", "add")
    else:
        machine.netlink.set_link(index, up=change.after == "up")


def _set_mtu(machine: Machine, name: str, index: int, mtu: int) -> None:
    """Set a netdev's MTU. IPoIB refuses a larger one than its port can have, and lowers one that the fabric cannot carry.

    It does so in datagram mode, and tells nobody (ipoib_change_mtu, drivers/infiniband/ulp/ipoib/ipoib_main.c).
    """
    infiniband = is_ipoib(machine.files, name)
    try:
        machine.netlink.set_link(index, mtu=mtu)
    except OSError as error:
        if not infiniband or error.errno != errno.EINVAL:
            raise
    link = machine.netlink.link(name) if infiniband else None
    if link is not None and link.mtu < mtu:
        most = (
            "4092 at most, and no more than the subnet manager gives the partition (opensm: mtu=5 in partitions.conf)"
        )
        raise OSError(errno.EINVAL, f"it stays {link.mtu}: in datagram mode an InfiniBand netdev has {most}")


def _add_altname(machine: Machine, index: int, name: str) -> None:
    try:
        machine.netlink.add_altname(index, name)
    except FileExistsError as error:
        raise OSError(errno.EEXIST, who_is_called(machine, name, "give another altname")) from error


def who_is_called(machine: Machine, name: str, remedy: str) -> str:
    """Which other netdev has a name, as its own (then the ``remedy``) or as an alternative one."""
    other = machine.netlink.link(name)
    if other is None:
        return f"a netdev is called {name}"
    if other.name == name:
        return f"another netdev is called {name}; {remedy}"
    return f"{other.name} has it, too; if it is not needed there: ip link property del dev {other.name} altname {name}"
