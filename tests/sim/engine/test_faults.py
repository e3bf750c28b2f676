"""The kernel fails, the agent dies, or the machine changes at any write: later passes converge, and no user loses a device."""

import errno
import os
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent.engine.context import Callbacks, Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.dry_run import dry_run
from agent.engine.originals import Originals
from agent.engine.retry import Failures
from agent.hardware.functions import vf_addresses
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec, from_mapping
from agent.state.scope import Scope
from tests.sim.kernel import Kernel
from tests.sim.killed import Killed

pytestmark = pytest.mark.slow

PFS = {"0000:21:00.0": "02:00:00:00:01:00", "0000:41:00.0": "02:00:00:00:01:01"}
TOTAL = 5
ERRNOS = (errno.EIO, errno.EBUSY, errno.ENOSPC, errno.ENOMEM, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.EPERM)
# What emits no event when others change it; a resync finds it.
SILENT = frozenset({"irqs", "rps", "vfs"})

attributes = st.fixed_dictionaries(
    {},
    optional={
        "vlan": st.integers(0, 5),
        "trust": st.booleans(),
        "spoofchk": st.booleans(),
        "mtu": st.sampled_from([1400, 1500]),
        "rings": st.fixed_dictionaries({"rx": st.sampled_from([512, 1024])}),
        "max_tx_rate": st.sampled_from([0, 100, 1000]),
        "txqueuelen": st.sampled_from([500, 1000]),
        "driver": st.sampled_from(["netdevice", "vfio-pci"]),
    },
).filter(lambda vf: "rings" not in vf or vf.get("driver") != "vfio-pci")
vfs = st.fixed_dictionaries({"count": st.integers(0, TOTAL)}, optional={"defaults": attributes})
nics = st.fixed_dictionaries(
    {"mtu": st.sampled_from([1500, 4000, 9000])},
    optional={
        "vfs": vfs,
        "channels": st.fixed_dictionaries({"combined": st.integers(1, 2)}),
        "coalescing": st.fixed_dictionaries({"rx_usecs": st.sampled_from([3, 50])}),
        "offloads": st.dictionaries(st.sampled_from(["rx-gro", "rx-all", "tx-scatter-gather"]), st.booleans()),
    },
)
flags = st.fixed_dictionaries({"irqs": st.booleans(), "rps": st.booleans()})


def made(pair: list[dict[str, object]], flag: dict[str, bool]) -> NodeSpec:
    """A valid spec of drawn parts."""
    entries = [
        {"name": f"rail{number}", "select": {"pci": address}, **nic}
        for number, (address, nic) in enumerate(zip(PFS, pair, strict=True))
    ]
    document = {"node_name": "n1", "nics": entries, "irqs": {"pin": flag["irqs"]}, "rps": {"enable": flag["rps"]}}
    return from_mapping(document)


specs = st.builds(made, st.lists(nics, min_size=2, max_size=2), flags)


def node() -> Kernel:
    """A simulated node for any of the specs."""
    kernel = Kernel()
    for number, (address, mac) in enumerate(PFS.items()):
        kernel.add_nic(address, f"ens{number}", mac, node=number, total_vfs=TOTAL)
    kernel.load_vfio()
    return kernel


class Faults(RuleBasedStateMachine):
    """The agent's loop on a simulated node, with somebody breaking things at every write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = node()
        self.now = 0.0
        self.failures = Failures()
        self.originals = Originals()
        self.last: Pass | None = None
        self.verified: NodeSpec | None = None
        self.heard: set[str] = set()
        self.plotted: list[tuple[int, Callable[[], OSError | None]]] = []
        self.kernel.fault = self.fault
        self.kernel.host.asked = self.remember
        self.held: dict[str, tuple[object, ...]] = {}

    @initialize(spec=specs)
    def start(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.turn(None)

    # --- the agent ----------------------------------------------------------------------------------------

    def turn(self, scope: Scope) -> None:
        """One pass as the worker makes it."""
        try:
            self.last = converge(
                self.kernel.machine(),
                Goal(self.spec, verified=self.verified),
                Memory(lambda: self.now, self.failures, self.originals),
                self.last.have if self.last else None,
                scope,
                Callbacks(new_events=self.listen),
            )
        except Killed:
            self.last, self.failures = None, Failures()
            return
        except OSError:
            self.last = None
            return
        if is_ready(self.last.conditions) and not self.last.waiting:
            self.verified = self.spec
        if is_ready(self.last.conditions) and not self.heard:
            self.ready_is_true(self.last)

    def listen(self) -> Scope:
        events, self.heard = frozenset(self.heard), set()
        return events

    def ready_is_true(self, result: Pass) -> None:
        """Ready was said, and no event is waiting: only what emits none may differ, or what a newer spec waits for."""
        waiting = {(outcome.change.kind, outcome.change.target) for outcome in result.waiting}
        differing = [
            change
            for change in dry_run(self.kernel.machine(), self.spec).changes
            if change.kind not in SILENT and (change.kind, change.target) not in waiting and change.field != "*"
        ]
        assert not differing or result.waiting, differing

    def fault(self, operation: str, where: str, value: str) -> OSError | None:
        """What was plotted for this write. Writes take time."""
        self.now += 0.4
        self.plotted = [(after - 1, plot) for after, plot in self.plotted]
        due = [plot for after, plot in self.plotted if after < 0]
        self.plotted = [(after, plot) for after, plot in self.plotted if after >= 0]
        for plot in due:
            if (error := plot()) is not None:
                return error
        return None

    # --- the world ----------------------------------------------------------------------------------------

    @rule()
    def an_event_wakes_the_agent(self) -> None:
        self.turn(self.listen() or frozenset(PFS))

    @rule(seconds=st.sampled_from([0.3, 6.0, 400.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.turn(None)

    @rule(spec=specs)
    def the_operator_wants_something_else(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.last = None
        self.failures.forget()
        self.turn(None)

    @rule(after=st.integers(0, 30), number=st.sampled_from(ERRNOS))
    def a_write_will_fail(self, after: int, number: int) -> None:
        self.plotted.append((after, lambda: OSError(number, os.strerror(number))))

    @rule(after=st.integers(0, 30))
    def the_agent_will_be_killed(self, after: int) -> None:
        def kill() -> OSError | None:
            raise Killed

        self.plotted.append((after, kill))

    @rule(after=st.integers(0, 30), data=st.data())
    def the_world_will_change_under_a_write(self, after: int, data: st.DataObject) -> None:
        change = data.draw(st.sampled_from([self.vfs_vanish, self.driver_reloads, self.mtu_drifts, self.vf_is_taken]))
        address = data.draw(st.sampled_from(sorted(PFS)))

        def act() -> OSError | None:
            change(address)
            return None

        self.plotted.append((after, act))

    @rule(address=st.sampled_from(sorted(PFS)))
    def vfs_vanish(self, address: str) -> None:
        if not self.in_use(address):
            self.quietly(lambda: self.kernel.files.write(f"/sys/bus/pci/devices/{address}/sriov_numvfs", "0"))
            self.heard.add(address)

    @rule(address=st.sampled_from(sorted(PFS)))
    def driver_reloads(self, address: str) -> None:
        if not self.in_use(address):
            self.quietly(lambda: self.kernel.reload_driver(address))
            self.heard.add(address)

    @rule(address=st.sampled_from(sorted(PFS)))
    def mtu_drifts(self, address: str) -> None:
        self.quietly(lambda: self.kernel.netlink.set_link(self.kernel.netdev(address).ifindex, mtu=2000))
        self.heard.add(address)

    @rule(address=st.sampled_from(sorted(PFS)))
    def vf_is_taken(self, address: str) -> None:
        for target, function in sorted(vf_addresses(self.kernel.files, address).items()):
            if function not in self.kernel.host.allocated and self.kernel.has_netdev(function):
                self.kernel.host.allocated[function] = (f"team/pod-{target}",)
                # Between the last look at users and a write nobody can be kept out: it counts from the next look.
                self.held[function] = ()
                self.heard.add(address)
                return

    @rule(address=st.sampled_from(sorted(PFS)))
    def a_vf_comes_back_under_another_name(self, address: str) -> None:
        for function in sorted(vf_addresses(self.kernel.files, address).values()):
            if function not in self.held and self.kernel.has_netdev(function):
                self.kernel.move_away(function)
                self.kernel.come_back(function, "net1")
                self.heard.add(address)
                return

    @precondition(lambda self: self.held)
    @rule()
    def a_pod_ends(self) -> None:
        function = sorted(self.held)[0]
        del self.held[function], self.kernel.host.allocated[function]
        self.heard |= PFS.keys()

    def quietly(self, action: Callable[[], None]) -> None:
        """Somebody else's write: no fault is plotted against it."""
        self.kernel.fault, fault = (lambda *_: None), self.kernel.fault
        try:
            action()
        finally:
            self.kernel.fault = fault

    def remember(self) -> None:
        """Record a VF that an owner has just taken as the owner got it. The same change may have removed the VF."""
        for function in [function for function, identity in self.held.items() if not identity]:
            if self.kernel.has_netdev(function):
                self.held[function] = self.identity(function)
            else:
                del self.held[function], self.kernel.host.allocated[function]

    def in_use(self, address: str) -> bool:
        return any(function in self.held for function in vf_addresses(self.kernel.files, address).values())

    # --- what always holds --------------------------------------------------------------------------------

    def identity(self, function: str) -> tuple[object, ...]:
        """The properties of a VF that its owner would notice if they changed."""
        link = self.kernel.netdev(function)
        rings = tuple(self.kernel.ethtool.settings("rings", link.ifindex).items())
        return link.ifindex, link.mac, link.mtu, link.up, self.kernel.sriov.granted(function), rings

    @invariant()
    def nobody_lost_what_they_hold(self) -> None:
        self.remember()
        for function, identity in self.held.items():
            assert self.identity(function) == identity, f"{function} was disturbed"

    def teardown(self) -> None:
        """After the faults stop it converges."""
        if not hasattr(self, "spec"):
            return
        self.plotted.clear()
        self.held.clear()
        self.kernel.host.allocated.clear()
        for _ in range(6):
            self.now += 4000
            self.turn(None)
        assert self.last is not None
        assert is_ready(self.last.conditions), self.last.conditions
        assert dry_run(self.kernel.machine(), self.spec, self.originals).changes == ()


TestFaults = Faults.TestCase
TestFaults.settings = settings(
    max_examples=100, stateful_step_count=25, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
