"""NodeSpec: what one node should be, parsed strictly from JSON and written by one serializer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from attrs import Attribute, field, frozen

from agent.documents import LARGEST_SPEC, load, too_large
from agent.sha256 import digest
from agent.spec.conflicts import address_conflicts, nic_conflicts, setting_conflicts
from agent.spec.nic import DisruptionPolicy, Nic
from agent.spec.selector import name_of
from agent.spec.strict import MOST_FAULTS, Faults, did_you_mean, plain, structure
from agent.spec.sysctl_names import of_module_parameter
from agent.spec.sysctl_names import parsed as parsed_sysctls
from agent.spec.validators import Matches, OneOf, Within, cpu_list, is_date, some_cpus

IrqbalancePolicy = Literal["disabled", "banned", "untouched"]
Mode = Literal["enforce", "observe"]
NetnsMode = Literal["shared", "exclusive"]
Granularity = Literal["node", "device"]
ProbeSeverity = Literal["required", "warn", "off"]


PROBES = frozenset(
    {
        *("carrier", "clock", "device_plugins", "error_counters", "fabric", "gpus", "hung", "irqbalance"),
        *("kernel_modules", "kubelet_hugepages", "link_flaps", "memlock", "nics", "node_guids", "partition_keys"),
        *("pcie_link", "queue_interrupts", "rdma_chardevs", "rdma_devices", "rdma_ports", "subnet_manager"),
        "vf_netdevs",
    }
)
"""The names of the readiness checks. agent/probes has the checks."""

# A DNS name (RFC 1123), what the API server takes as a Node's name; an IPv4 address is one as well.
NODE_NAME = re.compile(
    r"(?=[\s\S]{1,253}(?![\s\S]))[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*"
)
MODULE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
# Netdevs' names have at most IFNAMSIZ - 1 bytes. A pattern that began with a wildcard would match the loopback device, too.
NETDEV_PATTERN = re.compile(r"[A-Za-z0-9_.-][A-Za-z0-9_.*?-]{0,14}")
# A longer number would make the name of a folder that no file system takes.
HUGEPAGE_SIZE = re.compile(r"[1-9][0-9]{0,8}[KMG]")
HUGEPAGE_UNITS = {"G": 1024 * 1024, "M": 1024, "K": 1}

SpecError = Faults


_POWER_OF_TWO = OneOf(
    tuple(1 << power for power in range(30)),
    "flows",
    f"is not a power of two up to {1 << 29}; give one, such as 32768",
)


def _probe_names(_: object, attribute: Attribute[Any], value: Mapping[str, object]) -> None:
    for name in value.keys() - PROBES:
        hint = did_you_mean(name, PROBES, f"known probes: {', '.join(sorted(PROBES))}")
        raise ValueError(f"{attribute.name}: unknown probe {name!r}; {hint}")


def _distinct_patterns(_: object, attribute: Attribute[Any], value: tuple[SteeredNetdevs, ...]) -> None:
    patterns = [entry.match for entry in value]
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise ValueError(f"{attribute.name}: the pattern {pattern} is given twice; keep one")


@frozen
class Irqs:
    """Interrupt placement of the fabric NICs. CPUs in ``exclude_cpus`` get no interrupt.

    ``follow_load``: queues may move from a CPU that is busy with packets to an idle one of the same NUMA node.
    """

    pin: bool = True
    exclude_cpus: str = field(default="", validator=cpu_list)
    irqbalance: IrqbalancePolicy = "disabled"
    follow_load: bool = False


@frozen
class SteeredNetdevs:
    """Netdevs of the host's network namespace, by a pattern of their names: ``*`` is any characters, ``?`` is one.

    ``cpus`` process their packets. If it is not given, all CPUs do but those that ``irqs.exclude_cpus`` or the kernel's
    command line keeps free.
    """

    match: str = field(
        validator=Matches(NETDEV_PATTERN, "write it as cali*: at most 15 characters, and no wildcard in front")
    )
    cpus: str | None = field(default=None, validator=some_cpus)

    def matches(self, name: str) -> bool:
        """Whether a netdev's name matches."""
        return fnmatchcase(name, self.match)


@frozen
class Rps:
    """Receive packet steering. ``enable``: for those netdevs of the NICs that have fewer queues than CPUs.

    ``netdevs``: for other netdevs, also those that appear later (a container network plugin makes netdevs for pods). If
    several entries match a name, the first one applies.
    """

    enable: bool = True
    netdevs: tuple[SteeredNetdevs, ...] = field(default=(), validator=_distinct_patterns)


def _kilobytes(size: str) -> int:
    return int(size[:-1]) * HUGEPAGE_UNITS[size[-1]]


def _largest_unit(size: str) -> str:
    """2M for 2048K: one size has one notation."""
    if not HUGEPAGE_SIZE.fullmatch(size):
        return size  # the validator says so
    kilobytes = _kilobytes(size)
    return next(f"{kilobytes // unit}{name}" for name, unit in HUGEPAGE_UNITS.items() if kilobytes % unit == 0)


@frozen
class HugepagePool:
    """Huge pages of one ``size`` (such as 2M or 1G): ``count`` of them on a NUMA node, or over all nodes if that is None."""

    size: str = field(converter=_largest_unit, validator=Matches(HUGEPAGE_SIZE, "write it as 2M or 1G"))
    count: int = field(validator=Within(0, 1 << 30, "pages"))
    numa_node: int | None = field(default=None, validator=Within(0, 1023, "NUMA nodes"))

    @property
    def kilobytes(self) -> int:
        """A page's size in KiB."""
        return _kilobytes(self.size)

    @property
    def name(self) -> str:
        """The pool's name in changes: ``2M``, ``1G node1``."""
        return self.size if self.numa_node is None else f"{self.size} node{self.numa_node}"

    @classmethod
    def named(cls, name: str, count: int) -> HugepagePool:
        """A pool of ``count`` pages from its :attr:`name`."""
        size, _, node = name.partition(" node")
        return cls(size, count, int(node) if node else None)


@frozen
class Gpus:
    """The GPUs that the node must have. ``peer_memory``: RDMA devices must be able to reach their memory."""

    count: int = field(validator=Within(1, 64, "GPUs"))
    peer_memory: bool = False


@frozen
class ProbePolicy:
    """How the results of one readiness check count; ``None`` is the check's own default.

    ``fail_after`` failures within the last ``of`` checks make its condition False. A check that has not ended ``deadline``
    seconds after its start is Unknown.
    """

    severity: ProbeSeverity | None = None
    fail_after: int | None = field(default=None, validator=Within(1, 100, "failures"))
    of: int | None = field(default=None, validator=Within(1, 100, "checks"))
    deadline: int | None = field(default=None, validator=Within(1, 600, "seconds"))

    def __attrs_post_init__(self) -> None:
        if self.of is not None and self.of < (self.fail_after or 1):
            raise ValueError(f"of: {self.of} checks cannot hold {self.fail_after} failures; raise of to fail_after")


@frozen
class Silence:
    """Makes a check only warn until the end of the day ``until`` (UTC). ``reason`` says why."""

    until: str = field(validator=is_date)
    reason: str

    def __attrs_post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError("reason: it is empty; say why, for whoever reads the report")


@frozen
class Flaps:
    """When losses of carrier quarantine a NIC: ``losses`` of them within ``within`` seconds, or ``daily`` within 24 hours.

    It is on probation once it was up for ``quiet`` seconds, and good after ``probation`` further seconds without a loss. A loss
    on probation quarantines it again, and doubles ``quiet`` each time, up to 24 hours.
    """

    losses: int = field(default=5, validator=Within(1, 50, "losses"))
    within: int = field(default=600, validator=Within(1, 86400, "seconds"))
    daily: int = field(default=6, validator=Within(1, 50, "losses"))
    quiet: int = field(default=3600, validator=Within(60, 86400, "seconds"))
    probation: int = field(default=86400, validator=Within(60, 604800, "seconds"))


@frozen
class Readiness:
    """The settings of the readiness checks, by the check's name (:data:`PROBES`), and when flaps quarantine a NIC.

    With ``granularity`` device a fault of a NIC does not cost the node Ready while ``at_least`` so many NICs, or ``these``, are
    ready. With node every fault of a required NIC does.
    """

    probes: Mapping[str, ProbePolicy] = field(factory=dict, validator=_probe_names)
    silenced: Mapping[str, Silence] = field(factory=dict, validator=_probe_names)
    flaps: Flaps = Flaps()
    granularity: Granularity = "node"
    at_least: int | None = field(default=None, validator=Within(1, 64, "NICs"))
    these: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        given = (self.at_least is not None) + bool(self.these)
        if self.granularity == "node" and given:
            raise ValueError('granularity: at_least and these have an effect only with "device"; give that, or neither')
        if self.granularity == "device" and given != 1:
            raise ValueError("granularity: say which NICs the node needs: at_least (how many), or these (their names)")


def _one_line(place: str, value: str) -> None:
    if not value.strip() or len(value.splitlines()) != 1:
        raise ValueError(f"{place}: {value!r} is not a value; give one line of text")


def _module_parameters(value: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The parameters by the names that sysfs has, with ``_``: modprobe(8) takes ``-`` for it."""
    parsed: dict[str, dict[str, str]] = {}
    key = "module_parameters"
    for module, parameters in value.items():
        if not MODULE_NAME.fullmatch(module):
            raise ValueError(f"{key}: {module} is not a module's name; see lsmod(8)")
        own = module.replace("-", "_")
        if own in parsed:
            raise ValueError(f"{key}: - and _ are the same in modules' names; keep one")
        parsed[own] = {}
        for name, given in parameters.items():
            if not MODULE_NAME.fullmatch(name):
                raise ValueError(f"{key}: {module}.{name} is not a module and its parameter; see modinfo(8)")
            _one_line(f"{key}.{module}.{name}", given)
            if sysctl := of_module_parameter(own, name.replace("-", "_")):
                raise ValueError(f"{key}.{module}.{name}: use the sysctl {sysctl}")
            parsed[own][name.replace("-", "_")] = given
        if len(parsed[own]) != len(parameters):
            raise ValueError(f"{key}.{module}: - and _ are the same in names; keep one")
    return parsed


def _hugepages(_: object, attribute: Attribute[Any], value: tuple[HugepagePool, ...]) -> None:
    places: dict[tuple[str, int | None], str] = {}
    for index, pool in enumerate(value):
        place = f"{attribute.name}[{index}]"
        first = places.setdefault((pool.size, pool.numa_node), place)
        if first != place:
            raise ValueError(f"{first} and {place}: {pool.name} is given twice; keep one")
    for (size, node), place in places.items():
        if node is not None and (whole := places.get((size, None))):
            raise ValueError(f"{whole} and {place}: {size} is given for all nodes and for node {node}; keep either")


@frozen
class Rfs:
    """Receive flow steering: to the CPU where the application reads. ``entries``: how many flows the node has.

    ``isolated``: also steer to CPUs that the kernel command line keeps free (isolcpus, nohz_full).
    """

    enable: bool = False
    # rps_sock_flow_sysctl() takes up to 1 << 29, and rounds up to a power of two.
    entries: int = field(default=32768, validator=_POWER_OF_TWO)
    isolated: bool = False


@frozen
class Xps:
    """Transmit packet steering: each CPU sends through one queue, the one whose interrupt is nearest."""

    enable: bool = True


@frozen
class Rdma:
    """The node's RDMA subsystem.

    ``at_least``: how many of the NICs that have ``rdma`` must satisfy it. If it is not given, all required ones must.
    """

    netns_mode: NetnsMode | None = None
    at_least: int | None = field(default=None, validator=Within(1, 64, "NICs"))


@frozen
class NodeSpec:
    """What one node should be. ``node_name`` is the name of its Kubernetes Node, which may be an IP address.

    In ``mode`` observe the agent reports the plan and writes nothing, so no condition is required.
    ``node_number``: the host's part of the addresses that are derived from a network.
    """

    node_name: str = field(validator=Matches(NODE_NAME, "give the Node's name: lower case, digits, '-' and '.'"))
    nics: tuple[Nic, ...] = ()
    irqs: Irqs = Irqs()
    rps: Rps = Rps()
    rfs: Rfs = Rfs()
    xps: Xps = Xps()
    rdma: Rdma = Rdma()
    disruption: DisruptionPolicy = field(factory=DisruptionPolicy)
    readiness: Readiness = field(factory=Readiness)
    sysctls: Mapping[str, str] = field(factory=dict, converter=parsed_sysctls)
    module_parameters: Mapping[str, Mapping[str, str]] = field(factory=dict, converter=_module_parameters)
    hugepages: tuple[HugepagePool, ...] = field(default=(), validator=_hugepages)
    gpus: Gpus | None = None
    mode: Mode = "enforce"
    # As many as a network of prefix length 8 has.
    node_number: int | None = field(default=None, validator=Within(1, (1 << 24) - 2, "(the number of the node)"))

    def __attrs_post_init__(self) -> None:
        # Each pair of keys may be a fault: do not look for more than are reported.
        if faults := list(islice(self._faults(), MOST_FAULTS + 1)):
            raise Faults(faults)

    @cached_property
    def _hash(self) -> str:
        """:func:`spec_hash`. Cached: each report and each line of the history has it."""
        return digest(to_json(self).encode()).hex()[:16]

    def _faults(self) -> Iterator[str]:
        yield from nic_conflicts(self.nics, self.irqs.pin)
        if self.irqs.follow_load and not self.irqs.pin:
            yield "irqs.pin false and irqs.follow_load: the agent places no interrupt then; keep one"
        yield from address_conflicts(self.nics, self.node_number, self.sysctls)
        netns_mode = self.rdma.netns_mode is not None
        yield from setting_conflicts(self.sysctls, self.module_parameters, self._by_sysctl(), self.nics, netns_mode)
        expecting = sum(nic.select.most for nic in self.nics if nic.rdma is not None)
        if self.rdma.at_least is not None and self.rdma.at_least > expecting:
            yield f"rdma.at_least: {self.rdma.at_least} is more than the {expecting} NICs that have rdma"
        names = {name_of(nic.name, index) for nic in self.nics for index in range(nic.select.most)}
        if self.readiness.at_least is not None and self.readiness.at_least > len(names):
            yield f"readiness.at_least: {self.readiness.at_least} is more than the {len(names)} NICs of the spec"
        for position, name in enumerate(self.readiness.these):
            if name not in names:
                yield f"readiness.these[{position}]: no NIC is called {name}; give names of NICs"

    def _by_sysctl(self) -> dict[str, str]:
        """The keys other than ``sysctls`` that set a sysctl, by its name."""
        if self.rps.enable and self.nics:
            return {"net.core.rps_default_mask": "rps.enable"}
        return {"net.core.rps_default_mask": "rps.netdevs"} if self.rps.netdevs else {}

    def sysctls_kept(self) -> dict[str, str]:
        """The key that sets each sysctl, by the sysctl's name."""
        return {**self._by_sysctl(), **{name: f"sysctls[{name!r}]" for name in self.sysctls}}


def parse(text: str, where: str = "spec") -> NodeSpec:
    """Parse one node's spec.

    :param text: a JSON object.
    :param where: what the errors call the document: a file's name or a host.
    :raises SpecError: with every fault and its place.
    """
    try:
        document = load(text, LARGEST_SPEC)
    except ValueError as error:
        raise SpecError([f"{where}: not valid JSON: {error}"]) from None
    return from_mapping(document, where)


def from_mapping(document: object, where: str = "spec") -> NodeSpec:
    """Make a NodeSpec from plain data (dicts, lists, scalars), as strictly as :func:`parse`."""
    spec = structure(document, NodeSpec, where)
    # The spec must stay readable after to_json(), which may take more bytes than the JSON it came from.
    if len(to_json(spec)) > LARGEST_SPEC:
        raise SpecError(
            [f"{where}: written as JSON {too_large(LARGEST_SPEC)}; use fewer groups, and ranges in their index"]
        )
    return spec


def to_json(spec: NodeSpec) -> str:
    """The spec as JSON in its only form: sorted keys, defaults left out, a newline at the end."""
    return json.dumps(plain(spec), indent=2, sort_keys=True) + "\n"


def spec_hash(spec: NodeSpec) -> str:
    """The spec's identifier in reports: the first 16 hexadecimal digits of the SHA-256 of :func:`to_json`."""
    return spec._hash
