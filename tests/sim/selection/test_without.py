"""`select.without`: while the NIC that it names is hidden, no NIC of the entry gets another name, number or setting."""

import errno
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from attrs import define, evolve, field

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.originals import Originals
from agent.hardware.functions import PCI
from agent.kinds.queues import QUEUES
from agent.report.records import Condition
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from agent.state.scope import Scope
from tests.sim.kernel import Kernel
from tests.sim.passes import spec_of
from tests.sim.seams import seen

PFS = ("0000:21:00.0", "0000:41:00.0", "0000:61:00.0", "0000:81:00.0", "0000:a1:00.0")
STORAGE, RAIL, LAST = PFS[:3]
VENDOR = {"vendor": "8086", "each": True}
EXCLUDED = ("storage", "backup")


def name_of(pf: str) -> str:
    return f"ens{PFS.index(pf)}"


def mac_of(pf: str) -> str:
    return f"02:00:00:00:01:0{PFS.index(pf)}"


def altname_of(pf: str) -> str:
    return f"stor{PFS.index(pf)}"


def serial_of(pf: str) -> str:
    return f"MT2231X00{PFS.index(pf)}"


def device_serial_of(pf: str) -> str:
    return f"b8-3f-d2-ff-ff-12-34-0{PFS.index(pf)}"


def selectors(pf: str) -> list[dict[str, str]]:
    return [
        {"mac": mac_of(pf)},
        {"netdev": name_of(pf)},
        {"netdev": altname_of(pf)},
        {"serial": serial_of(pf)},
        {"serial": device_serial_of(pf)},
        {"pci": pf},
        {"mac": mac_of(pf), "driver": "igb"},
        {"vendor": "8086", "serial": serial_of(pf), "driver": "igb"},
    ]


def spec(selected: list[dict[str, str]], each: dict[str, Any], **more: Any) -> NodeSpec:
    """An entry for each NIC that is no rail, and one for all rails."""
    excluded = EXCLUDED[: len(selected)]
    nics = [
        *(
            {"name": name, "select": s, "required": False, "mtu": 1500}
            for name, s in zip(excluded, selected, strict=True)
        ),
        {
            "name": "rail{index}",
            "select": {**VENDOR, **each, "without": list(excluded)},
            "mtu": 9000,
            "altnames": ["rail{index}"],
            "vfs": {"count": 2},
            **more,
        },
    ]
    rps = {"netdevs": [{"match": "e*"}], "enable": False}
    return spec_of(*nics, node_number=7, rps=rps, irqs={"irqbalance": "untouched"})


@define
class Node:
    """A machine, of whose NICs those in ``excluded`` are no rails, and the agent on it."""

    pfs: tuple[str, ...] = PFS[:3]
    excluded: tuple[str, ...] = (STORAGE,)
    kernel: Kernel = field(factory=lambda: Kernel(cpus=4))
    originals: Originals = field(factory=Originals)
    now: float = 0.0
    hung: frozenset[str] = frozenset()
    broken: dict[str, tuple[str, ...]] = field(factory=dict)
    last: Pass | None = None

    def __attrs_post_init__(self) -> None:
        for pf in self.pfs:
            self.add(pf)

    @property
    def rails(self) -> tuple[str, ...]:
        return tuple(pf for pf in self.pfs if pf not in self.excluded)

    def add(self, pf: str) -> None:
        self.kernel.add_nic(pf, name_of(pf), mac_of(pf))
        self.identify(pf)

    def identify(self, pf: str) -> None:
        """Give a NIC serial numbers and an alternative name of its own, besides its MAC and its name."""
        number = PFS.index(pf)
        dsn = bytes(256) + struct.pack("<III", 0x00010003, 0xFF123400 | number, 0xB83FD2FF) + bytes(64)
        self.kernel.give_serials(pf, dsn, b"\x90\x0d\x00SN\x0a" + serial_of(pf).encode() + b"\x78")
        if altname_of(pf) not in self.kernel.netdev(pf).altnames:
            self.kernel.netlink.add_altname(self.kernel.netdev(pf).ifindex, altname_of(pf))

    def run(self, wanted: NodeSpec, scope: Scope = None) -> Pass:
        self.now += 400.0
        machine = evolve(seen(self.kernel.machine(), self.see), hung=self.hung)
        memory = Memory(lambda: self.now, originals=self.originals)
        last = self.last.have if self.last else None
        self.last = converge(machine, Goal(wanted), memory, last, scope if last else None)
        return self.last

    def see(self, call: str, what: str) -> None:
        if any(what.startswith(f"{PCI}/{pf}/{file}") for pf, files in self.broken.items() for file in files):
            raise OSError(errno.EIO, "Input/output error", what)

    def names(self) -> dict[str, tuple[str, int | None]]:
        """The name and the rail's number of each NIC that the agent works on."""
        assert self.last
        return {address: (nic.nic.name, nic.nic.rail) for address, nic in self.last.want.nics.items()}

    def conditions(self) -> dict[str, Condition]:
        assert self.last
        return {c.reason: c for c in self.last.conditions if c.type == "NicsPresent"}

    def values(self, pf: str) -> object:
        """What the agent sets for a NIC."""
        link = self.kernel.netdev(pf)
        mask = self.kernel.files.read(f"{QUEUES.format(name=link.name)}/rx-0/rps_cpus")
        addresses = self.kernel.netlink.addresses().get(link.ifindex, ())
        names = {link.name, *link.altnames} - {f"eth{PFS.index(pf)}"}
        return names, link.mtu, self.kernel.sriov.count(pf), mask, addresses

    # --- a NIC hides, and shows itself again ----------------------------------------------------------

    def udev_lags(self, pf: str) -> None:
        """The driver is loaded again, and udev has not named the netdev yet."""
        self.unbind(pf)
        self.kernel.bind(pf, f"eth{PFS.index(pf)}", mac_of(pf))
        self.kernel.netlink.remove_altname(self.kernel.netdev(pf).ifindex, name_of(pf))
        self.kernel.udev.lags(pf)

    def udev_catches_up(self, pf: str) -> None:
        self.identify(pf)
        self.kernel.udev.catches_up(pf)

    def unbind(self, pf: str) -> None:
        self.kernel.sriov.set_count(pf, 0)
        self.kernel.unbind(pf)

    def bind(self, pf: str) -> None:
        self.kernel.bind(pf, name_of(pf), mac_of(pf))
        self.identify(pf)

    def pass_through(self, pf: str) -> None:
        self.unbind(pf)
        self.kernel.set_driver(pf, "vfio-pci")

    def lose_netdev(self, pf: str) -> None:
        self.kernel.sriov.set_count(pf, 0)
        self.kernel.lose_netdev(pf)

    def hangs(self, pf: str) -> None:
        """It is unbound, and the call never returned: nothing but its PCI files can be read."""
        self.unbind(pf)
        self.hung |= {pf}

    def hangs_in_a_call(self, pf: str) -> None:
        """It has its netdev, and a call to its driver never returned. The next worker knows of no pass before it."""
        self.hung, self.last = self.hung | {pf}, None
        self.kernel.hanging[pf] = 0

    def returns(self, pf: str) -> None:
        self.hung, self.last = self.hung - {pf}, None
        self.kernel.hanging.pop(pf, None)

    def is_reset(self, pf: str) -> None:
        self.hung -= {pf}
        self.bind(pf)


Step = Callable[[Node, str], object]
LOSSES: dict[str, tuple[Step, Step]] = {
    "in a pod": (lambda n, pf: n.kernel.move_away(pf), lambda n, pf: n.kernel.come_back(pf, name_of(pf))),
    "no netdev": (Node.lose_netdev, Node.bind),
    "no driver": (Node.unbind, Node.bind),
    "passed through": (Node.pass_through, Node.bind),
    "not named yet": (Node.udev_lags, Node.udev_catches_up),
    "unreadable": (lambda n, pf: n.broken.update({pf: ("vendor",)}), lambda n, pf: n.broken.pop(pf)),
    "hung": (Node.hangs, Node.is_reset),
    "hung with its netdev": (Node.hangs_in_a_call, Node.returns),
    "serial unreadable": (lambda n, pf: n.broken.update({pf: ("vpd", "config")}), lambda n, pf: n.broken.pop(pf)),
}
BY_NUMBER = range(len(selectors(STORAGE)))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("number", BY_NUMBER)
def test_no_nic_of_the_entry_changes_while_the_excluded_one_is_hidden(number: int, loss: str) -> None:
    node = Node()
    wanted = spec([selectors(STORAGE)[number]], {})
    assert is_ready(node.run(wanted).conditions)
    names, values = node.names(), {pf: node.values(pf) for pf in node.rails}
    hide, show = LOSSES[loss]
    hide(node, STORAGE)
    for scope in (None, frozenset({STORAGE})):
        node.run(wanted, scope)
        assert node.names().items() <= names.items()
        assert {pf: node.values(pf) for pf in node.rails} == values
        assert node.kernel.sriov.count(STORAGE) == 0
    show(node, STORAGE)
    assert is_ready(node.run(wanted).conditions)
    assert node.names() == names
    assert {pf: node.values(pf) for pf in node.rails} == values


def test_the_condition_names_what_is_not_known_and_a_remedy() -> None:
    node = Node()
    wanted = spec([{"mac": mac_of(STORAGE)}], {})
    node.run(wanted)
    node.kernel.move_away(STORAGE)
    node.run(wanted)
    condition = node.conditions()["NicsUnknown"]
    assert (condition.status, condition.severity) == ("Unknown", "required")
    assert f"({STORAGE}: no netdev here)" in condition.message
    assert condition.remedy.endswith("or select storage by pci")


@pytest.mark.parametrize("number", BY_NUMBER)
def test_an_excluded_nic_that_this_machine_does_not_have_stops_nothing(number: int) -> None:
    node = Node(pfs=PFS[1:3])
    wanted = spec([selectors(STORAGE)[number]], {})
    assert is_ready(node.run(wanted).conditions)
    names = {RAIL: ("rail0", None), LAST: ("rail1", None)}
    assert node.names() == names
    # As long as a rail cannot be told from the NIC that is not found, the entry waits.
    node.unbind(RAIL)
    node.run(wanted)
    assert node.names() == ({} if {"mac", "netdev"} & selectors(STORAGE)[number].keys() else names)
    node.bind(RAIL)
    assert is_ready(node.run(wanted).conditions)
    assert node.names() == names


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "unreadable"])
def test_a_rail_that_is_hidden_keeps_its_number_while_the_excluded_nic_is_found(loss: str) -> None:
    node = Node()
    wanted = spec([{"serial": serial_of(STORAGE)}], {})
    node.run(wanted)
    names, values = node.names(), node.values(LAST)
    LOSSES[loss][0](node, RAIL)
    node.kernel.netlink.set_link(node.kernel.netdev(LAST).ifindex, mtu=1500)
    node.run(wanted)
    assert names.items() >= node.names().items() >= {LAST: names[LAST]}.items()
    assert node.values(LAST) == values


def test_a_function_whose_driver_makes_no_netdev_is_no_nic_that_is_named_by_its_netdev() -> None:
    node = Node(pfs=PFS[1:3])
    for pf in node.pfs:
        node.unbind(pf)
        node.kernel.set_driver(pf, "efa")
    nics = [
        {"name": "storage", "select": {"netdev": name_of(STORAGE)}, "required": False},
        {"name": "efa{index}", "select": {**VENDOR, "without": ["storage"]}},
    ]
    node.run(spec_of(*nics))
    assert node.names() == {RAIL: ("efa0", None), LAST: ("efa1", None)}


def test_the_masks_of_netdevs_of_an_entry_that_lacks_a_nic_stay() -> None:
    node = Node()
    wanted = spec([{"pci": STORAGE}], {"min": 2})
    assert is_ready(node.run(wanted).conditions)
    values = node.values(LAST)
    node.kernel.remove_nic(RAIL)
    node.run(wanted)
    assert node.names() == {STORAGE: ("storage", None)}
    assert node.values(LAST) == values


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_random_machines_keep_each_name_number_and_value(seed: int) -> None:
    """NICs hide and show themselves again in a random order, and an excluded one may be taken out."""
    trial = random.Random(seed)  # noqa: S311  no secret
    pfs = PFS[: trial.randint(3, 5)]
    node = Node(pfs, tuple(sorted(trial.sample(pfs, trial.randint(1, 2)))))
    rails = len(node.rails)
    each: dict[str, Any] = trial.choice([{}, {"driver": "igb"}, {"device": "10c9"}, {"max": rails + 1}, {"min": rails}])
    more: dict[str, Any] = {}
    if trial.random() < 0.4:
        each = {**each, "min": rails, "max": rails}
        more = {"rail": 3, "addresses": [{"network": "10.{rail}.0.0/16"}]}
    wanted = spec([trial.choice(selectors(pf)) for pf in node.excluded], each, **more)
    result = node.run(wanted)
    assert is_ready(result.conditions), result.conditions
    names, values = node.names(), {pf: node.values(pf) for pf in pfs}
    hidden: dict[str, str] = {}
    touched: set[str] = set()
    for _ in range(8):
        pf = trial.choice(pfs)
        if pf in hidden:
            _show(node, pf, hidden.pop(pf))
        elif pf in node.excluded and trial.random() < 0.2:
            hidden[pf] = "taken out"
            node.kernel.remove_nic(pf)
        else:
            # An entry that selects by a driver leaves what another driver has.
            gone = "passed through" if "driver" in each and pf in node.rails else None
            hidden[pf] = trial.choice([loss for loss in LOSSES if loss != gone])
            LOSSES[hidden[pf]][0](node, pf)
        touched.add(pf)
        result = node.run(wanted, trial.choice([None, frozenset({pf})]))
        assert node.names().items() <= names.items(), hidden
        for other in pfs:
            if other not in touched:
                assert node.values(other) == values[other], (other, hidden)
        if set(hidden.values()) <= {"taken out"}:
            assert node.names().keys() == set(pfs) - hidden.keys(), hidden
    for pf, loss in hidden.items():
        _show(node, pf, loss)
    node.run(wanted)
    result = node.run(wanted)
    assert is_ready(result.conditions), result.conditions
    assert node.names() == names
    assert {pf: node.values(pf) for pf in pfs} == values


def _show(node: Node, pf: str, loss: str) -> None:
    if loss == "taken out":
        node.add(pf)
    else:
        LOSSES[loss][1](node, pf)
