"""If any single read fails, only the device that was read is left alone and reported, until it can be read again."""

import errno
import json
import os
from collections.abc import Iterator

import pytest
from attrs import define, field

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.machine import DcbState
from agent.report.records import HOST, to_plain
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from agent.state.scope import Scope
from tests.sim.kernel import Kernel
from tests.sim.passes import condition, nic, spec_of
from tests.sim.seams import seen

pytestmark = pytest.mark.slow

SOUND, FAULTY, OTHER = "0000:21:00.0", "0000:41:00.0", "0000:61:00.0"
SETTINGS = {
    "mtu": 9000,
    "channels": {"combined": 1},
    "rings": {"rx": 1024},
    "coalescing": {"rx_usecs": 50},
    "offloads": {"rx-gro": False},
    "max_read_request": 4096,
    "vfs": {"count": 2, "defaults": {"trust": True, "rings": {"rx": 512}}},
}
ROCE = {"roce": {"trust": "dscp", "pfc": "3", "cm_tos": 106}, "rdma": {"pf": True, "gid_type": "RoCE v2"}}


def spec(required: bool) -> NodeSpec:
    """A spec of two NICs; the second has every setting."""
    sound = nic("rail0", SOUND, **SETTINGS)
    faulty = nic("rail1", FAULTY, required=required, **SETTINGS, **ROCE)
    return spec_of(sound, faulty, rfs={"enable": True}, xps={"enable": True})


@define
class Node:
    """A node on which one read fails. ``broken``: the operation and its path; ``error``: the errno."""

    kernel: Kernel = field(factory=Kernel)
    broken: tuple[str, str] | None = None
    error: int = errno.EIO
    reads: dict[tuple[str, str], None] = field(factory=dict)
    failures: Failures = field(factory=Failures)
    now: float = 0.0
    last: Pass | None = None

    def __attrs_post_init__(self) -> None:
        for number, address in enumerate((SOUND, FAULTY, OTHER)):
            self.kernel.add_nic(address, f"ens{number}", f"02:00:00:00:01:0{number}", node=number % 2)
        self.kernel.rdma.add(FAULTY, "rocep65s0", "ens1")
        self.kernel.rdma.dcb["ens1"] = DcbState(frozenset({0}))

    def see(self, what: str, where: str) -> None:
        self.reads[what, where] = None
        if (what, where) == self.broken:
            raise OSError(self.error, os.strerror(self.error), where)

    def turn(self, wanted: NodeSpec, scope: Scope = None) -> Pass:
        self.now += 4000
        machine = seen(self.kernel.machine(), self.see)
        have = self.last.have if self.last else None
        self.last = converge(machine, Goal(wanted), Memory(lambda: self.now, self.failures), have, scope)
        return self.last

    def names(self, address: str) -> set[str]:
        """The names by which paths and requests refer to a function and its VFs."""
        functions = [address, *vf_addresses(self.kernel.files, address).values()]
        links = [self.kernel.netdev(function) for function in functions if self.kernel.has_netdev(function)]
        folders = (f"/sys/bus/pci/devices/{function}/msi_irqs" for function in functions)
        irqs = [
            number
            for folder in folders
            if folder in self.kernel.tree.folders
            for number in self.kernel.files.names(folder)
        ]
        return {
            *functions,
            *(link.name for link in links),
            *(f"/irq/{number}/" for number in irqs),
            *(f"/data/n{link.ifindex}" for link in links),
            *(["rocep65s0"] if address == FAULTY else []),
        }

    def of(self, address: str, what: str, where: str) -> bool:
        """Whether a read belongs to a device."""
        functions = [address, *vf_addresses(self.kernel.files, address).values()]
        links = [self.kernel.netdev(function) for function in functions]
        by_index = what.startswith("ethtool.") and where in {str(link.ifindex) for link in links}
        return by_index or any(f"{name}/" in f"{where}/" for name in self.names(address))

    def drift(self) -> None:
        for address in (SOUND, FAULTY):
            self.kernel.netlink.set_link(self.kernel.netdev(address).ifindex, mtu=2000)

    def mtus(self) -> tuple[int, int]:
        return self.kernel.netdev(SOUND).mtu, self.kernel.netdev(FAULTY).mtu


def report(result: Pass) -> str:
    """The text of the conditions that are not True and of the outcomes that were not applied."""
    conditions = [condition for condition in result.conditions if condition.status != "True" or condition.message]
    outcomes = [outcome for outcome in result.outcomes if outcome.result != "applied"]
    return json.dumps(to_plain((conditions, outcomes)))


def settled(required: bool) -> tuple[Node, NodeSpec]:
    node, wanted = Node(), spec(required)
    for _ in range(3):
        result = node.turn(wanted)
    assert is_ready(result.conditions), result.conditions
    node.reads.clear()
    node.turn(wanted)
    return node, wanted


def broken_in_turn(node: Node, address: str) -> Iterator[tuple[str, str]]:
    own = [read for read in node.reads if node.of(address, *read)]
    assert len(own) > 5
    yield from own


@pytest.mark.parametrize("scope", [None, frozenset({SOUND, FAULTY, HOST})], ids=["whole", "event"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ETIMEDOUT, errno.ENODEV])
@pytest.mark.parametrize("required", [True, False])
def test_a_failing_read_of_a_nic_affects_only_that_nic(required: bool, error: int, scope: Scope) -> None:
    node, wanted = settled(required)
    for read in broken_in_turn(node, FAULTY):
        node.broken, node.error = read, error
        node.drift()
        for _ in range(2):
            result = node.turn(wanted, scope)
        sound, faulty = node.mtus()
        assert sound == 9000, read
        text = report(result)
        # Some errors mean that the kernel does not have the attribute: it is read as absent.
        assert faulty == 9000 or any(name in text for name in (FAULTY, "ens1")), read
        if faulty != 9000:
            assert is_ready(result.conditions) is not required, (read, result.conditions)
            assert error == errno.ENODEV or "reset the device" in text, read
        node.broken = None
        result = node.turn(wanted)
        assert node.mtus() == (9000, 9000), read
        assert is_ready(result.conditions), (read, result.conditions)


def test_a_failing_read_of_a_function_that_is_in_no_spec_affects_nothing() -> None:
    node, wanted = settled(required=True)
    for read in broken_in_turn(node, OTHER):
        node.broken = read
        node.drift()
        result = node.turn(wanted)
        assert node.mtus() == (9000, 9000), read
        assert is_ready(result.conditions), (read, result.conditions)
        assert OTHER in report(result), read


def test_the_condition_of_an_unreadable_required_nic_names_the_file_and_a_remedy() -> None:
    node, wanted = settled(required=True)
    node.broken = ("files.read", "/sys/class/net/ens1/queues/rx-0/rps_cpus")
    result = node.turn(wanted)
    missing = condition(result, "NicsPresent")
    assert (missing.status, missing.reason, missing.severity) == ("Unknown", "DeviceUnreadable", "required")
    assert FAULTY in missing.message and "rps_cpus" in missing.message and "dmesg" in missing.remedy
    assert node.failures.next_try() is not None, "it is read again soon"


def test_devices_converge_although_a_read_of_the_hosts_state_fails() -> None:
    """Except for the lists of devices and processes and for the CPUs, which every pass needs."""
    node, wanted = settled(required=True)
    essential = (
        "files.read /sys/devices/system/",
        "files.names /sys/devices/system/",
        "files.names /sys/bus/pci/devices",
        "processes.running",
    )
    owned = {read for address in (SOUND, FAULTY, OTHER) for read in node.reads if node.of(address, *read)}
    for read in [read for read in node.reads if read not in owned and not f"{read[0]} {read[1]}".startswith(essential)]:
        node.broken = read
        node.drift()
        try:
            result = node.turn(wanted)
        except OSError as error:
            pytest.fail(f"{read}: {error}")
        # If the read is a source of users, the device is not disturbed.
        assert node.mtus() == (9000, 9000) or "its users cannot" in report(result), read
        node.broken = None
        node.turn(wanted)


HOST_WIDE = {
    "rps": {"netdevs": [{"match": "cali*"}]},
    "hugepages": [{"size": "2M", "count": 4, "numa_node": node} for node in (0, 1)],
    "module_parameters": {"nvme_core": {"io_timeout": "60", "max_retries": "9"}},
}
POOL = "/sys/devices/system/node/node{}/hugepages/hugepages-2048kB/nr_hugepages"
STEERED = "/sys/class/net/{}/queues/rx-0/rps_cpus"
PARAMETER = "/sys/module/nvme_core/parameters/{}"


@pytest.mark.parametrize(
    ("failing", "other", "value", "required"),
    [
        (STEERED.format("cali1"), STEERED.format("cali2"), "0000000f", False),
        ("/sys/class/net/cali1/ifindex", STEERED.format("cali2"), "0000000f", False),
        (POOL.format(0), POOL.format(1), "4", True),
        (PARAMETER.format("io_timeout"), PARAMETER.format("max_retries"), "9", True),
    ],
)
def test_a_failing_read_of_one_value_of_the_host_affects_only_that_value(
    failing: str, other: str, value: str, required: bool
) -> None:
    node = Node()
    for name in ("cali1", "cali2"):
        node.kernel.add_virtual(name)
    for name in ("io_timeout", "max_retries"):
        node.kernel.tree.put(PARAMETER.format(name), "5")
    node.broken = ("files.read", failing)
    result = node.turn(spec_of(**HOST_WIDE))
    assert node.kernel.files.read(other) == value
    assert failing in report(result)
    assert is_ready(result.conditions) is not required
    node.broken = None
    result = node.turn(spec_of(**HOST_WIDE))
    assert failing not in report(result)
    assert is_ready(result.conditions)


def test_a_machine_that_names_no_cpu_is_an_error_with_the_file() -> None:
    node = Node()
    node.kernel.tree.put("/sys/devices/system/cpu/online", "")
    with pytest.raises(OSError, match="it says that no CPU is online"):
        node.turn(spec(required=True))


HUGE = "9" * 5000


@pytest.mark.parametrize("odd", ["x", "-1", "", "\u00b2", HUGE])
def test_a_file_name_that_is_no_number_is_ignored_among_a_devices_parts(odd: str) -> None:
    node, usual = Node(), Node()
    pci, port = f"/sys/bus/pci/devices/{FAULTY}", "/sys/class/infiniband/rocep65s0/ports"
    queues = "/sys/class/net/ens1/queues"
    for path in (
        f"{pci}/msi_irqs/{odd or 'none'}",
        f"{pci}/virtfn{odd}",
        f"{port}/{odd or 'none'}/state",
        f"{port}/1/gids/{odd or 'none'}",
        f"{queues}/rx-{odd}/rps_cpus",
        f"{queues}/tx-{odd}/xps_cpus",
        f"/sys/class/net/ens1/ecn/roce_np/enable/{odd or 'none'}",
        f"/sys/devices/system/node/node{odd}/cpulist",
    ):
        node.kernel.tree.put(path, "1")
    results = [each.turn(spec(True)) for each in (node, usual) for _ in range(3)]
    assert is_ready(results[2].conditions), results[2].conditions
    assert [result.outcomes for result in results[:3]] == [result.outcomes for result in results[3:]]
