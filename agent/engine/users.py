"""Who uses a function: asked for when a change would disturb it, since looking costs more than a pass."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from attrs import evolve, frozen

from agent.hardware.functions import NET, PCI, VFIO, driver, ifindex, netdev, pci_of, targets
from agent.hardware.rdma import CHAR_DEVICES, Reader
from agent.hardware.sysfs import names_or_none, read_or
from agent.machine import Machine
from agent.report.records import Change, Disruption
from agent.state.wanted import Wanted
from agent.vendors import vendor

# nfs and ceph name their servers in the options or in the source (`10.0.0.1:/export`, `10.0.0.1:6789,10.0.0.2:6789:/`).
ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])|\[[0-9a-f:]+\]")
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "ceph", "cifs", "smb3", "lustre", "9p", "glusterfs"})


@frozen
class User:
    """Someone who would lose a function.

    ``takes``: it was handed to them, so that its attributes, MTU and name are theirs (a container, a virtual machine).
    """

    name: str
    takes: bool = False


@frozen
class _Functions:
    """A PF and its VFs: target to PCI address, and target to the netdev in the host's network namespace."""

    pci: Mapping[str, str]
    netdevs: Mapping[str, str]


def reaches(change: Change) -> str | None:
    """The function whose users a change may hit; None: the PF's and those of all of its VFs."""
    return change.target if "#" in change.target else None


def users(
    machine: Machine, want: Wanted, address: str, among: frozenset[str] | None = None
) -> dict[str, tuple[User, ...]]:
    """The users of a PF and of its VFs, by target; those without users are left out.

    :param among: look only at these targets; None: at all.

    What cannot be told (a kubelet that does not answer) counts as a user: nothing is disturbed on a guess.
    """
    return _found(machine, want, address, among, (*OTHERS, *TAKERS))


def owners(
    machine: Machine, want: Wanted, address: str, among: frozenset[str] | None = None
) -> dict[str, tuple[User, ...]]:
    """As :func:`users`, without looking for those to whom nothing can have been handed: it costs much less."""
    return _found(machine, want, address, among, TAKERS)


def _found(
    machine: Machine, want: Wanted, address: str, among: frozenset[str] | None, sources: Sequence[Source]
) -> dict[str, tuple[User, ...]]:
    pci = targets(machine.files, address) if among is None else _those(machine, among)
    found = {target: netdev(machine.files, function) for target, function in pci.items()}
    functions = _Functions(pci, {target: name for target, name in found.items() if name is not None})
    gathered: dict[str, list[User]] = {}
    for source in sources:
        for target, user in source(machine, want, functions):
            gathered.setdefault(target, []).append(user)
    return {target: tuple(found) for target, found in gathered.items()}


def _those(machine: Machine, among: frozenset[str]) -> dict[str, str]:
    """The PCI addresses of these targets, as far as they are there: not all of a device's, of which there may be a thousand."""
    found = {}
    for target in sorted(among):
        with suppress(FileNotFoundError):
            found[target] = pci_of(machine.files, target)
    return found


def _victims(found: Mapping[str, tuple[User, ...]], change: Change) -> tuple[str, ...]:
    """Whom a change of a VF (``ADDRESS#N``), or of a PF (``ADDRESS``) and so of any of its VFs, would hit."""
    function = reaches(change)
    keys = sorted(found) if function is None else [function]
    return tuple(f"{user.name} ({key})" for key in keys for user in found.get(key, ()))


def with_affected(change: Change, want: Wanted, found: Mapping[str, tuple[User, ...]]) -> Change:
    """A change with those whom it would hit."""
    function = want.nics[change.device].function if change.device in want.nics else None
    if function and change.disruption is Disruption.VF_RESET and not vendor(function.driver).vf_count_flaps:
        # Only its VFs go: whoever uses the PF itself notices nothing.
        found = {target: found[target] for target in found if target != change.device}
    return evolve(change, affected=_victims(found, change))


def taken(found: Mapping[str, tuple[User, ...]], target: str) -> bool:
    """Whether a VF was handed to somebody."""
    return any(user.takes for user in found.get(target, ()))


Found = Iterator[tuple[str, User]]
Source = Callable[[Machine, Wanted, _Functions], Found]


def _namespaces(machine: Machine, want: Wanted, functions: _Functions) -> Found:
    """A bound network driver whose netdev the host does not see: a container runtime has moved it."""
    for target, pci in functions.pci.items():
        bound = driver(machine.files, pci)
        # Asked for anew: it may have been moved since this look began.
        if bound is not None and vendor(bound).has_netdev and netdev(machine.files, pci) is None:
            yield target, User("another network namespace", takes=True)


def _allocations(machine: Machine, want: Wanted, functions: _Functions) -> Found:
    """What the kubelet has given to pods."""
    try:
        allocated = machine.kubelet.allocations()
    except OSError as error:
        for target in functions.pci:
            yield target, User(f"unknown pods, since the kubelet does not say: {error.strerror or error}")
        return
    reader = Reader(machine.files)
    for target, pci in functions.pci.items() if allocated else ():
        for pod in allocated.get(pci, ()):
            yield target, User(f"pod {pod}", takes=True)
        # What stands on it was given, not itself: a share of its RDMA device, a subfunction.
        parts = {*reader.of(pci), *names_or_none(machine.files, f"{PCI}/{pci}")}
        for part in sorted(parts & allocated.keys()):
            for pod in allocated[part]:
                yield target, User(f"pod {pod} by {part}")
    _must_be_whole(reader)


def _must_be_whole(reader: Reader) -> None:
    """An RDMA device that cannot be read may be anybody's, and nothing is disturbed on a guess.

    :raises OSError: there was such a one.
    """
    if reader.failed is not None:
        raise reader.failed


def _vfio(machine: Machine, want: Wanted, functions: _Functions) -> Found:
    """Processes that hold it open through its VFIO group, which it may share with others, or by itself: a virtual machine."""
    nodes = [
        (f"/dev/vfio/{node}", target)
        for target, pci in functions.pci.items()
        if driver(machine.files, pci) == VFIO
        for node in _vfio_nodes(machine, pci)
    ]
    return _held(machine, nodes, takes=True)


def _vfio_nodes(machine: Machine, pci: str) -> Iterator[str]:
    group = machine.files.target(f"{PCI}/{pci}/iommu_group")
    # The second where there is no IOMMU (vfio_noiommu_group_alloc), the third for who uses iommufd (Linux 6.6).
    yield from (group, f"noiommu-{group}")
    yield from (f"devices/{name}" for name in names_or_none(machine.files, f"{PCI}/{pci}/vfio-dev"))


def _verbs(machine: Machine, want: Wanted, functions: _Functions) -> Found:
    """Processes that hold RDMA devices open that serve it: its own, its bond's, those that stand on its netdev."""
    reader = Reader(machine.files)
    nodes = [
        (f"{CHAR_DEVICES}/{name}", target)
        for target, pci in functions.pci.items()
        for device in reader.of(pci)
        for name in reader.char_devices_of(pci, device)
        if name.startswith("uverbs")
    ]
    _must_be_whole(reader)
    return _held(machine, nodes, takes=False)


def _held(machine: Machine, nodes: Sequence[tuple[str, str]], takes: bool) -> Found:
    """Who has these device nodes open, each with its target: asked only if there are any, it reads all of /proc."""
    holders = machine.processes.holders(frozenset(node for node, _ in nodes)) if nodes else {}
    for node, target in nodes:
        for holder in holders.get(node, ()):
            yield target, User(holder, takes)


def _routes(machine: Machine, want: Wanted, functions: _Functions) -> Found:
    """Routes through a gateway, and the address by which the cluster knows the node."""
    routed = machine.netlink.gateway_ifindexes()
    addresses = machine.netlink.addresses()
    for target, name in functions.netdevs.items():
        index = ifindex(machine.files, name)
        if index in routed:
            yield target, User(f"a route through {name}")
        if any(address.partition("/")[0] == want.spec.node_name for address in addresses.get(index, ())):
            yield target, User(f"the node's address on {name}")


def _storage(machine: Machine, want: Wanted, functions: _Functions) -> Found:
    """Network file systems and NVMe over fabrics whose server is reached through it."""
    by_ifindex = {ifindex(machine.files, name): target for target, name in functions.netdevs.items()}
    for what, server in sorted({*_mounted(machine), *_nvme(machine)}):
        target = by_ifindex.get(machine.netlink.route_ifindex(server) or 0)
        if target is not None:
            yield target, User(f"{what} of {server}")


def _mounted(machine: Machine) -> Iterator[tuple[str, str]]:
    for line in read_or(machine.files, "/proc/1/mounts", "").splitlines():
        source, point, kind, options, *_ = [*line.split(), "", "", "", ""]
        if kind in NETWORK_FILE_SYSTEMS:
            for server in _addresses(f"{source} {options}"):
                yield f"{kind} on {point}", server


def _nvme(machine: Machine) -> Iterator[tuple[str, str]]:
    for name in names_or_none(machine.files, "/sys/class/nvme"):
        if read_or(machine.files, f"/sys/class/nvme/{name}/transport", "pcie") in ("rdma", "tcp"):
            fields = read_or(machine.files, f"/sys/class/nvme/{name}/address", "").split(",")
            for server in _addresses(" ".join(field for field in fields if field.startswith("traddr="))):
                yield name, server


def _addresses(text: str) -> Iterator[str]:
    for match in ADDRESS.findall(text):
        try:
            yield str(ipaddress.ip_address(match.strip("[]")))
        except ValueError:
            continue


def _uppers(machine: Machine, want: Wanted, functions: _Functions) -> Found:
    """Netdevs that stand on it: bonds, bridges, VLANs, macvlans."""
    for target, name in functions.netdevs.items():
        for entry in names_or_none(machine.files, f"{NET}/{name}"):
            if entry.startswith("upper_"):
                yield target, User(f"{entry.removeprefix('upper_')} on {name}")


TAKERS: tuple[Source, ...] = (_vfio, _allocations, _namespaces)
"""To whom a function can have been handed. Asked last: a function is taken at any time, and what is asked last is newest."""

OTHERS: tuple[Source, ...] = (_verbs, _routes, _storage, _uppers)
