"""A worker is killed at any write to the machine or to the file of originals: no value that it wrote becomes an original."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import pytest
from attrs import define, field
from hypothesis import given, settings

from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.originals import ORIGINALS, Originals
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.report.verdict import is_ready
from agent.spec.addresses import ARP
from agent.spec.node import NodeSpec
from tests.sim.kernel import Kernel, no_fault
from tests.sim.killed import Killed
from tests.sim.passes import condition, settle, spec_of

pytestmark = pytest.mark.slow

PF = "0000:21:00.0"
FOREIGN = "198.51.100.9/24"
QUEUE = "/proc/sys/net/core/somaxconn"

vf_values = st.fixed_dictionaries(
    {},
    optional={
        "trust": st.booleans(),
        "spoofchk": st.booleans(),
        "vlan": st.sampled_from([0, 5, 7]),
        "max_tx_rate": st.sampled_from([0, 100]),
        "mtu": st.sampled_from([1300, 1400, 1500]),
        "txqueuelen": st.sampled_from([500, 1000]),
    },
)
nic_values = st.fixed_dictionaries(
    {},
    optional={
        "mtu": st.sampled_from([1500, 4000, 9000]),
        "txqueuelen": st.sampled_from([500, 1000]),
        "coalescing": st.fixed_dictionaries({"rx_usecs": st.sampled_from([3, 50, 70])}),
        "rings": st.fixed_dictionaries({"rx": st.sampled_from([256, 512, 1024])}),
        "addresses": st.lists(st.sampled_from(["192.0.2.11/24", "192.0.2.12/24", "fd00::7/64", FOREIGN]), unique=True),
    },
)
specs = st.fixed_dictionaries(
    {"vf": vf_values, "nic": nic_values, "pin": st.booleans(), "queue": st.sampled_from([None, "4096", "128", "512"])}
)


def wanting(desired: dict[str, Any]) -> NodeSpec:
    nic = {
        "name": "rail0",
        "select": {"pci": PF},
        "vfs": {"count": 2, "defaults": desired["vf"]},
        "rail": 0,
        **desired["nic"],
    }
    sysctls = {"net.core.somaxconn": desired["queue"]} if desired["queue"] else {}
    switches = {"irqs": {"pin": desired["pin"]}, "rps": {"enable": desired["pin"]}}
    return spec_of(nic, sysctls=sysctls, **switches)


NOTHING = wanting({"vf": {}, "nic": {}, "pin": False, "queue": None})


@define
class Node:
    """A node, and its agent's file of originals.

    ``writes``: the number of writes after which the worker is killed; None: never. ``cut``: the part (0 to 1) of the last line
    in the file that was written by then.
    """

    path: Path
    kernel: Kernel = field(factory=Kernel)
    writes: int | None = None
    cut: float = 1.0
    before: bytes = b""

    def __attrs_post_init__(self) -> None:
        self.kernel.add_nic(PF, "enp33s0", "02:00:00:00:01:00")
        self.kernel.tree.put(QUEUE, "128")
        self.follow(NOTHING)

    def written(self, operation: str, where: str, value: str) -> OSError | None:
        now = self.file()
        if self.writes == 0:
            if now.startswith(self.before):
                more = round(self.cut * (len(now) - len(self.before)))
                self.path.write_bytes(now[: len(self.before) + more])
            raise Killed
        if self.writes is not None:
            self.writes -= 1
        self.before = now
        return None

    def file(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def follow(self, spec: NodeSpec) -> None:
        """Start a worker, as after each kill, and let it make three passes."""
        originals, failures = Originals.load(self.path), Failures()
        self.before = self.file()
        self.kernel.fault = self.written
        try:
            for number in range(3):
                now = 1000.0 * number
                result = converge(self.kernel.machine(), Goal(spec), Memory(partial(float, now), failures, originals))
        except Killed:
            return
        finally:
            self.kernel.fault = no_fault
        assert is_ready(result.conditions), result.conditions

    def values(self) -> list[object]:
        """The present value of everything that the specs set."""
        ethtool, netdev = self.kernel.machine().ethtool, self.kernel.netdev(PF)
        links = [self.kernel.netdev(function) for function in (PF, *vf_addresses(self.kernel.files, PF).values())]
        return [
            *((link.name, link.mtu, link.txqueuelen, link.up) for link in links),
            self.kernel.vfs(PF),
            ethtool.settings("coalescing", netdev.ifindex),
            ethtool.settings("rings", netdev.ifindex),
            [
                self.kernel.files.read(f"/proc/irq/{number}/smp_affinity_list")
                for number in self.kernel.files.names("/proc/irq")
            ],
            self.kernel.files.read(QUEUE),
            self.kernel.netlink.addresses(),
            self.kernel.netlink.routes({254, 479100}),
            self.kernel.netlink.rules(),
            [self.kernel.files.read(f"/proc/sys/net/ipv4/conf/enp33s0/{setting}") for setting in ARP],
        ]

    def set_otherwise(self, trust: bool, vlan: int, mtu: int) -> None:
        """Set values before the agent manages them."""
        for index in range(2):
            self.kernel.netlink.set_vf(self.kernel.netdev(PF).ifindex, index, trust=trust, vlan=vlan)
        self.kernel.netlink.set_link(self.kernel.netdev(PF).ifindex, mtu=mtu)
        self.kernel.netlink.add_address(self.kernel.netdev(PF).ifindex, FOREIGN)


steps = st.lists(st.tuples(specs, st.none() | st.integers(0, 25), st.floats(0, 1)), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(steps, st.booleans(), st.sampled_from([0, 5]), st.sampled_from([1500, 9000]))
def test_after_any_kills_values_that_leave_the_spec_are_restored(steps: Any, trust: bool, vlan: int, mtu: int) -> None:
    with TemporaryDirectory() as folder:
        node = Node(Path(folder) / ORIGINALS)
        node.set_otherwise(trust, vlan, mtu)
        before = node.values()
        for desired, writes, cut in steps:
            node.writes, node.cut = writes, cut
            node.follow(wanting(desired))
        node.writes = None
        node.follow(NOTHING)
        assert node.values() == before


TRUSTED = {"vf": {"trust": True}, "nic": {"mtu": 9000}, "pin": False, "queue": "4096"}
DISTRUSTED = {"vf": {"trust": False}, "nic": {"mtu": 1500}, "pin": False, "queue": "128"}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=6)), max_size=5), st.integers(0, 5))
def test_overwritten_bytes_in_the_file_never_become_an_original(spots: Any, writes: int) -> None:
    """A value whose original is unknown stays as it is: no value ever appears that was never set."""
    with TemporaryDirectory() as folder:
        node = Node(Path(folder) / ORIGINALS)
        node.writes = writes
        node.follow(wanting(TRUSTED))
        content = bytearray(node.file())
        for place, junk in spots:
            at = round(place * len(content))
            content[at : at + len(junk)] = junk
        node.path.write_bytes(content)
        node.writes = None
        node.follow(wanting({**TRUSTED, "nic": {"mtu": 4000}}))
        node.follow(NOTHING)
        assert node.kernel.netdev(PF).mtu in (1500, 4000)
        assert node.kernel.files.read(QUEUE) in ("128", "4096")


def test_a_lost_original_is_reported_and_not_replaced_by_another_value(tmp_path: Path) -> None:
    node = Node(tmp_path / ORIGINALS)
    node.follow(wanting(TRUSTED))
    node.path.write_bytes(b"\xff\xfe[[[[\n" + node.file().replace(b"9000", b"9001"))
    originals = Originals.load(node.path)
    for kept in (originals, Originals.load(node.path)):  # the second reads what the first wrote
        assert kept.condition is not None
        assert kept.condition.reason == "Unreadable"
    changed = settle(node.kernel, wanting({**TRUSTED, "nic": {"mtu": 4000}}), originals=originals)
    lost = condition(changed, "OriginalsKept")
    assert (lost.status, lost.severity) == ("False", "warn")
    node.follow(NOTHING)
    assert node.kernel.netdev(PF).mtu == 4000, "the agent wrote 9000, so it is no original"
    assert [vf.trust for vf in node.kernel.vfs(PF)] == [False, False], "the other originals are known"


def test_a_reader_of_the_file_does_not_write_to_it(tmp_path: Path) -> None:
    node = Node(tmp_path / ORIGINALS)
    node.follow(wanting(TRUSTED))
    before = node.file()
    reader = Originals.load(node.path, keep=False)
    settle(node.kernel, NOTHING, originals=reader)
    assert node.kernel.netdev(PF).mtu == 1500
    assert node.file() == before


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    path = tmp_path / ORIGINALS
    path.mkdir()
    condition = Originals.load(path, keep=False).condition
    assert condition is not None
    assert (condition.status, condition.reason, condition.severity) == ("False", "Unreadable", "warn")
    assert condition.remedy == "set those by hand"


def test_values_that_a_write_brought_back_stay_forgotten_after_a_restart(tmp_path: Path) -> None:
    node = Node(tmp_path / ORIGINALS)
    originals = Originals.load(node.path)
    for spec in (wanting(TRUSTED), NOTHING):
        for _ in range(2):
            settle(node.kernel, spec, originals=originals)
    assert node.kernel.netdev(PF).mtu == 1500
    node.kernel.netlink.set_link(node.kernel.netdev(PF).ifindex, mtu=9000)
    node.follow(NOTHING)
    assert node.kernel.netdev(PF).mtu == 9000, "an operator has set it since: there is nothing to restore"


def test_the_file_of_originals_stays_small(tmp_path: Path) -> None:
    node = Node(tmp_path / ORIGINALS)
    originals, failures = Originals.load(node.path), Failures()
    for number in range(3000):
        desired = {**DISTRUSTED, "queue": "4096" if number % 2 else "512"}
        settle(node.kernel, wanting(desired), failures=failures, originals=originals)
    assert len(node.file().splitlines()) < 1100
    node.follow(NOTHING)
    assert node.kernel.files.read(QUEUE) == "128"


@pytest.fixture
def full() -> Iterator[Callable[[bool], None]]:
    """Files cannot grow (EFBIG), as on a full file system."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_full(full: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else limits[0], limits[1]))

    yield set_full
    set_full(False)


def test_if_originals_cannot_be_written_repairs_go_on_and_it_is_reported(
    tmp_path: Path, full: Callable[[bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path / ORIGINALS)
    originals = Originals.load(node.path)

    def reasons(spec: NodeSpec) -> list[str]:
        result = settle(node.kernel, spec, originals=originals)
        return [c.reason for c in result.conditions if c.type == "OriginalsKept"]

    capsys.readouterr()
    full(True)
    assert reasons(wanting(TRUSTED)) == ["NotWritten"]
    assert node.kernel.netdev(PF).mtu == 9000
    condition = originals.condition
    assert condition is not None
    why = f"{node.path} cannot be written: File too large"
    assert condition.message == f"{why}; they are lost if the agent ends now"
    assert (condition.status, condition.severity, condition.remedy) == ("False", "warn", "make room in /run")
    full(False)
    said = f"{why}; until it can be, a restart of the agent forgets what values were before"
    assert capsys.readouterr().err.splitlines() == [said], "said once"
    assert reasons(wanting({**TRUSTED, "nic": {"mtu": 4000}})) == []
    node.follow(NOTHING)
    assert node.kernel.netdev(PF).mtu == 1500
    assert [vf.trust for vf in node.kernel.vfs(PF)] == [False, False]


def test_a_link_that_a_kill_left_down_is_not_noted_as_down_before(tmp_path: Path) -> None:
    node = Node(tmp_path / ORIGINALS)
    node.path.unlink()  # as after a reboot: the agent finds the VFs up
    vf = vf_addresses(node.kernel.files, PF)[0]
    node.kernel.lose_carrier(vf)

    def kill(operation: str, where: str, value: str) -> OSError | None:
        if operation == "set_link" and "up=True" in value:
            raise Killed
        return None

    originals, failures = Originals.load(node.path), Failures()
    node.kernel.fault = kill
    settle(node.kernel, NOTHING, failures=failures, originals=originals)
    with pytest.raises(Killed):
        settle(node.kernel, NOTHING, now=100.0, failures=failures, originals=originals)
    assert not node.kernel.netdev(vf).up
    node.kernel.fault = no_fault
    node.follow(NOTHING)
    node.follow(spec_of())
    assert node.kernel.netdev(vf).up
