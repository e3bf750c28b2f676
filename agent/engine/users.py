"""Finds who uses a function. That costs more than a pass, so it is done only when a change would disturb users."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TypeVar

from attrs import evolve, frozen

from agent.driver_families import XEN, family_of, is_passed_through, is_vfio
from agent.engine.traffic import traffic, with_a_peer
from agent.hardware import device_nodes, parts
from agent.hardware.bonds import bond_of_ports, ipoib_children, on_top, ports_of, vrf
from agent.hardware.functions import PCI, driver, ifindex, is_away, pci_of, targets, vf_count
from agent.hardware.rdma import CHAR_DEVICES, Reader
from agent.hardware.sysfs import names_in
from agent.kinds import vfs
from agent.kinds.ethtool import CHANNELS
from agent.machine import Files, Machine, Rdma
from agent.report.records import Change, Disruption
from agent.report.target import is_vf
from agent.state.wanted import Wanted

CONNECTED = frozenset({"RC", "UC"})
"""The types of queue pairs that are connected with one peer. The kernel has UD and GSI on each device for itself."""

IPOIB = "ib_ipoib"

# Below a host are the sessions of iSCSI, the remote ports of FCoE, and else the targets themselves (drivers/scsi).
SCSI_HOST = re.compile(r"host\d+")
SCSI_TARGETS = ("session", "rport-", "target")


@frozen
class User:
    """A user of a function: a process, a pod, a route, a mount.

    ``owns``: it owns the function, so the attributes, MTU and name are its own (a container, a virtual machine). ``by_lag``: it
    uses an RDMA device of a port that may have RoCE LAG, so a change of the number of VFs may take the device away.
    ``only_by_lag``: it is the device of another port, so no other change disturbs it. ``of_queue``: it has a queue for itself.
    """

    name: str
    owns: bool = False
    by_lag: bool = False
    only_by_lag: bool = False
    of_queue: bool = False


@frozen
class _Functions:
    """A PF and its VFs: target to PCI address, and the netdevs in the host's network namespace, each with its target.

    ``netdevs``: also those of their parts. ``away``: the parts whose netdev is elsewhere, each with its target. ``bonds``: PF
    to the bond with which it may have RoCE LAG, if the first VFs end it.
    """

    pci: Mapping[str, str]
    netdevs: Sequence[tuple[str, str]]
    away: Sequence[tuple[str, str]]
    bonds: Mapping[str, str]


def may_disturb(change: Change) -> bool:
    """Whether a change may disturb anybody. One of channels may even if the link stays up: queues go, and some are in use."""
    return change.disruption > Disruption.NONE or change.kind == CHANNELS.name


def reaches(change: Change) -> str | None:
    """The target of the function whose users a change may disturb; None: the PF and all its VFs."""
    return change.target if is_vf(change.target) else None


def users(
    machine: Machine, want: Wanted, address: str, among: frozenset[str] | None = None, complete: bool = True
) -> dict[str, tuple[User, ...]]:
    """The users of a PF and of its VFs, by target. Targets without users are left out.

    If a source gives no answer (the kubelet), it counts as a user: a device with unknown users is not disturbed.

    :param among: look only at these targets; None: at all.
    :param complete: False: look only for owners, which costs much less.
    :raises OSError: a source of owners gives no answer, and ``complete`` is False: any function may have an owner.
    """
    pci = targets(machine.files, address) if among is None else _existing(machine, among)
    files = machine.files
    by_part = {target: parts.netdevs(files, each) for target, each in pci.items()} if complete else {}
    names = [(target, name) for target, found in by_part.items() for name in chain(*found.values())]
    away = [(target, part) for target, found in by_part.items() for part, each in found.items() if part and not each]
    bonds = {target: _lag(files, function) for target, function in pci.items() if not is_vf(target)}
    functions = _Functions(pci, names, away, {target: bond for target, bond in bonds.items() if bond is not None})
    by_target: dict[str, list[User]] = {}
    for source in USERS if complete else OWNERS:
        for target, user in source(machine, want, functions):
            by_target.setdefault(target, []).append(user)
    return {target: tuple(users) for target, users in by_target.items()}


def _lag(files: Files, pci: str) -> str | None:
    return bond_of_ports(files, pci) if family_of(driver(files, pci)).first_vfs_end_lag else None


def _existing(machine: Machine, among: frozenset[str]) -> dict[str, str]:
    """The PCI addresses of these targets, without those that do not exist. Does not list all VFs, perhaps a thousand."""
    addresses = {}
    for target in sorted(among):
        with suppress(FileNotFoundError):
            addresses[target] = pci_of(machine.files, target)
    return addresses


def _affected(by_target: Mapping[str, tuple[User, ...]], change: Change) -> tuple[str, ...]:
    """The users whom a change would disturb. A change of a PF disturbs the users of its VFs, too."""
    function = reaches(change)
    targets = sorted(by_target) if function is None else [function]
    return tuple(f"{user.name} ({target})" for target in targets for user in by_target.get(target, ()))


def with_affected(change: Change, want: Wanted, by_target: Mapping[str, tuple[User, ...]]) -> Change:
    """A change with the users whom it would disturb."""
    function = want.nics[change.device].function if change.device in want.nics else None
    own = by_target.get(change.device, ())
    if change.kind != vfs.NAME:
        own = tuple(user for user in own if not user.only_by_lag)
    elif function and not family_of(function.driver).vf_count_flaps:
        # The PF's link stays up, so of its own users only those of RoCE LAG are disturbed.
        own = tuple(user for user in own if user.by_lag)
    if change.disruption == Disruption.NONE:
        # The link stays up.
        by_target = {change.target: tuple(user for user in by_target.get(change.target, ()) if user.of_queue)}
    elif own != by_target.get(change.device, ()):
        by_target = {**by_target, change.device: own}
    return evolve(change, affected=_affected(by_target, change))


def is_owned(by_target: Mapping[str, tuple[User, ...]], target: str) -> bool:
    """Whether a function has an owner."""
    return any(user.owns for user in by_target.get(target, ()))


Users = Iterator[tuple[str, User]]
Key = TypeVar("Key")
Source = Callable[[Machine, Wanted, _Functions], Users]


def _namespaces(machine: Machine, want: Wanted, functions: _Functions) -> Users:
    """A bound network driver whose netdev the host does not see: a container runtime has moved it."""
    for target, pci in functions.pci.items():
        # Read again: the netdev may have been moved since this lookup began.
        if is_away(machine.files, pci):
            yield target, User("another network namespace", owns=True)


def _allocations_or_unknown(machine: Machine, want: Wanted, functions: _Functions) -> Users:
    """As :func:`_allocations`; but if the kubelet gives no answer, every function counts as used."""
    try:
        allocated = machine.kubelet.allocations()
    except OSError as error:
        for target in functions.pci:
            yield target, User(f"unknown pods, since the kubelet does not say: {error.strerror or error}")
        return
    yield from _pods(machine, functions, allocated)


def _allocations(machine: Machine, want: Wanted, functions: _Functions) -> Users:
    return _pods(machine, functions, machine.kubelet.allocations())


def _pods(machine: Machine, functions: _Functions, allocated: Mapping[str, tuple[str, ...]]) -> Users:
    reader = Reader(machine.files)
    for target, pci in functions.pci.items() if allocated else ():
        for pod in allocated.get(pci, ()):
            yield target, User(f"pod {pod}", owns=True)
        # Not the function but a part of it was allocated: a share of its RDMA device, a subfunction.
        auxiliary = (part.rpartition("/")[2] for part in parts.auxiliary(machine.files, pci))
        names = {part: part for part in (*reader.of(pci), *auxiliary)}
        if is_vfio(driver(machine.files, pci)):
            # KubeVirt's name for it (pci_device.go). A share of another plugin may have the same number: no proof of an owner.
            group = machine.files.target(f"{PCI}/{pci}/iommu_group")
            names[group] = f"IOMMU group {group}"
        for part in sorted(names.keys() & allocated.keys()):
            for pod in allocated[part]:
                yield target, User(f"pod {pod} by {names[part]}")
    _raise_if_incomplete(reader)


def _raise_if_incomplete(reader: Reader) -> None:
    """Raise if an RDMA device could not be read. It may belong to this function, whose users are unknown then.

    :raises OSError: the error of that read.
    """
    if reader.failed is not None:
        raise reader.failed


def _passed_through(machine: Machine, want: Wanted, functions: _Functions) -> Users:
    """Processes that have the function open: by its VFIO group (shared with others), its VFIO, UIO, or vDPA device.

    Which virtual machine has a function of Xen's pciback is in no file of the kernel, so each of them counts as used.
    """
    files, unknown = machine.files, {}
    nodes = list(_vdpa(files, functions))
    for target, pci in functions.pci.items():
        bound = driver(files, pci)
        if bound == XEN:
            yield target, User("Xen's pciback", owns=True)
        elif is_vfio(bound):
            nodes += [(node, (target, True)) for node in device_nodes.of_vfio(files, pci)]
            if device_nodes.vfio_is_open(files, pci):
                unknown[target] = User("whoever has its VFIO device open")
        elif is_passed_through(bound):
            nodes += [(node, (target, True)) for node in device_nodes.of_uio(files, pci)]
    for (target, owns), holder in _held(machine, nodes):
        unknown.pop(target, None)
        yield target, User(holder, owns)
    yield from unknown.items()


def _vdpa(files: Files, functions: _Functions) -> Iterator[tuple[str, tuple[str, bool]]]:
    """The nodes of the vDPA devices of the functions, each with its target, and whether who has it open owns the function.

    A vDPA device lies below the function, or below the auxiliary device of a part of it (drivers/vhost/vdpa.c). Its name may be
    any: the operator gives it (vdpa-dev(8)).
    """
    devices = frozenset(names_in(files, device_nodes.VDPA))
    for target, pci in functions.pci.items() if devices else ():
        yield from ((node, (target, True)) for node in device_nodes.of_vdpa(files, f"{PCI}/{pci}", devices))
        for part in parts.auxiliary(files, pci):
            yield from ((node, (target, False)) for node in device_nodes.of_vdpa(files, part, devices))


def _opened(machine: Machine, want: Wanted, functions: _Functions) -> Users:
    """Who uses an RDMA device of the function (its own, a subfunction's, its bond's, or one on top of its netdev) or its clock.

    These are the processes that have it open, and the kernel's own connections (NVMe, iSER, SRP, NFS, SMB, Lustre). A subnet
    manager has no uverbs open but issm, which makes it the port's (ib_umad_sm_open, drivers/infiniband/core/user_mad.c). Who
    steers the PTP clock stops while the link is down, for which igb also resets the clock.
    """
    reader = Reader(machine.files)
    own = []
    for target, pci in functions.pci.items():
        of_parts = (names_in(machine.files, f"{part}/infiniband") for part in parts.auxiliary(machine.files, pci))
        user = User("", by_lag=target in functions.bonds)
        own += [(device, pci, (target, user)) for device in dict.fromkeys([*reader.of(pci), *chain(*of_parts)])]
    of_function = {(target, device) for device, _, (target, _) in own}
    others = [
        (device, port, (target, User(f" on {port}", by_lag=True, only_by_lag=True)))
        for target, bond in functions.bonds.items()
        for port in _other_ports(machine.files, target, bond)
        for device in reader.of(port)
        if (target, device) not in of_function
    ]
    devices = [*own, *others]
    nodes = [
        (f"{CHAR_DEVICES}/{node}", key)
        for device, pci, key in devices
        for node in reader.char_devices_of(pci, device)
        if node.startswith(("uverbs", "issm"))
    ]
    for target, pci in functions.pci.items():
        more = (*device_nodes.of_psm(machine.files, pci), *device_nodes.of_clock(machine.files, pci))
        nodes += [(node, (target, User(""))) for node in more]
    _raise_if_incomplete(reader)
    of_kernel = [(key, name) for device, _, key in devices for name in _of_kernel(machine.rdma, device)]
    for (target, user), name in (*_held(machine, nodes), *of_kernel):
        yield target, evolve(user, name=f"{name}{user.name}")


def _of_kernel(rdma: Rdma, device: str) -> list[str]:
    """The kernel's connections over an RDMA device, without those of IPoIB: they are traffic of its netdev."""
    peers: dict[str, set[str]] = {}
    for pair in rdma.queue_pairs(device):
        if pair.type in CONNECTED and pair.module != IPOIB:
            peers.setdefault(pair.module, set()).update(filter(None, [pair.peer]))
    return [with_a_peer(f"the kernel ({module}), connected", of_module) for module, of_module in sorted(peers.items())]


def _other_ports(files: Files, address: str, bond: str) -> list[str]:
    """The other ports of a bond, if they get RoCE LAG when this one has no VFs: then they have none either.

    So says mlx5_lag_check_prereq (drivers/net/ethernet/mellanox/mlx5/core/lag/lag.c).
    """
    others = [port for port in ports_of(files, bond) if port != address]
    return [] if any(vf_count(files, port) for port in others) else others


def _held(machine: Machine, nodes: Sequence[tuple[str, Key]]) -> Iterator[tuple[Key, str]]:
    """Who has these device nodes open: pairs of a node's key and the name of a process.

    It reads all of /proc, so it does nothing without nodes.
    """
    holders = machine.processes.holders(frozenset(node for node, _ in nodes)) if nodes else {}
    yield from ((key, holder) for node, key in nodes for holder in holders.get(node, ()))


def _traffic(machine: Machine, want: Wanted, functions: _Functions) -> Users:
    netdevs = {ifindex(machine.files, name): (name, target) for target, name in functions.netdevs}
    names = {index: name for index, (name, _) in netdevs.items() if index}
    for index, carried in traffic(machine, want.spec.node_name, names):
        yield netdevs[index][1], User(carried)


def _queues(machine: Machine, want: Wanted, functions: _Functions) -> Users:
    """The programs to which the kernel gave queues of the function's netdev. It removes no such queue while they run."""
    found = []
    for target, pci in functions.pci.items():
        # Read again, so that the function counts as hung if its driver has the netdev's lock and does not return.
        if (name := parts.own_netdev(machine.files, pci)) and (index := ifindex(machine.files, name)):
            found += [(target, name, user) for user in machine.netlink.queue_users(index)]
    sockets = frozenset(user.socket for _, _, user in found if user.socket)
    holders = machine.processes.holders(sockets) if sockets else {}
    for target, name, user in found:
        for holder in holders.get(user.socket, ("",)):
            by = f"{holder} by " if holder else ""
            yield target, User(f"{by}{user.how} on queue {user.queue} of {name}", of_queue=True)


def _scsi(machine: Machine, want: Wanted, functions: _Functions) -> Users:
    """SCSI hosts below the function that have targets: those of iSCSI or FCoE in the card are in no list of connections."""
    for target, pci in functions.pci.items():
        for host in names_in(machine.files, f"{PCI}/{pci}"):
            if SCSI_HOST.fullmatch(host) and any(
                name.startswith(SCSI_TARGETS) for name in names_in(machine.files, f"{PCI}/{pci}/{host}")
            ):
                yield target, User(f"targets of SCSI {host}")


def _parts(machine: Machine, want: Wanted, functions: _Functions) -> Users:
    """Subfunctions and virtio devices whose netdev the host does not see, as it was moved."""
    yield from ((target, User(f"{part} in another network namespace")) for target, part in functions.away)


def _uppers(machine: Machine, want: Wanted, functions: _Functions) -> Users:
    """Netdevs on top of the function's netdev: bonds, bridges, VLANs, macvlans, children of IPoIB, but no VRF; also of pods.

    On a kernel on which no other namespace can be searched, those of pods are unknown.
    """
    search = bool(functions.netdevs) and machine.namespaces.searchable()
    elsewhere = machine.netlink.uppers_elsewhere() if search else {}
    for target, name in functions.netdevs:
        for upper in elsewhere.get(ifindex(machine.files, name), ()) if elsewhere else ():
            yield target, User(f"{upper} on {name}, in another network namespace")
        yield from ((target, User(f"{child} on {name}")) for child in ipoib_children(machine.files, name))
        uppers = on_top(machine.files, name)
        link = machine.netlink.link(name) if uppers else None
        routing = vrf(machine.files, link) if link is not None else None
        yield from ((target, User(f"{upper} on {name}")) for upper in uppers if upper != routing)


OWNERS: tuple[Source, ...] = (_passed_through, _allocations, _namespaces)
"""Sources of owners."""

USERS: tuple[Source, ...] = (
    _opened,
    _traffic,
    _queues,
    _scsi,
    _parts,
    _uppers,
    _passed_through,
    _allocations_or_unknown,
    _namespaces,
)
"""The sources of users. Those of owners come last, since a function may be handed over at any time."""
