"""What the worker does with a spec, step by step, on a simulated kernel with one NIC."""

import errno
from collections.abc import Mapping
from pathlib import Path

from attrs import define, evolve, field

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.retry import Failures
from agent.machine import Machine
from agent.report.verdict import is_ready
from agent.service.spec_in_force import TRIAL, SpecInForce
from agent.spec.node import NodeSpec, to_json
from tests.sim.kernel import Kernel
from tests.sim.passes import rail0
from tests.sim.refusing import refusing

PF = "0000:21:00.0"


def spec(count: int) -> NodeSpec:
    return rail0(vfs={"count": count})


@define
class Agent:
    """What the worker does with a spec, step by step."""

    folder: Path
    kernel: Kernel
    now: float = 100.0
    hung: frozenset[str] = frozenset()
    failures: Failures = field(factory=Failures)
    in_force: SpecInForce = field(init=False)
    last: Pass | None = None

    def __attrs_post_init__(self) -> None:
        self.start()

    @property
    def file(self) -> Path:
        return self.folder / "node.json"

    def start(self, crashed: str | None = None, hung_writes: Mapping[str, str] | None = None) -> None:
        """Another worker."""
        (self.folder / "state").mkdir(exist_ok=True)
        (self.folder / "run").mkdir(exist_ok=True)
        self.last = None
        self.in_force = SpecInForce(
            self.folder / "state", self.folder / "run", crashed=crashed, hung_writes=hung_writes or {}
        )
        self.read()

    def machine(self) -> Machine:
        return evolve(self.kernel.machine(), hung=self.hung)

    def reboot(self) -> None:
        for file in (self.folder / "run").iterdir():
            file.unlink()
        self.start()

    def read(self, asked: bool = False) -> None:
        self.failures.forget()
        self.in_force.reload(self.machine(), self.file, self.now, asked, self.last)

    def give(self, wanted: NodeSpec) -> None:
        self.file.write_text(to_json(wanted))
        self.read(asked=True)

    def look(self) -> Pass:
        assert self.in_force.spec is not None
        goal = Goal(self.in_force.spec, verified=self.in_force.verified)
        result = converge(self.machine(), goal, Memory(lambda: self.now, self.failures))
        self.last = result
        if is_ready(result.conditions) and self.in_force.spec.mode == "enforce":
            self.in_force.ready(result)
        if self.in_force.gives_up(result, self.now):
            self.failures.forget()
            return self.look()
        return result

    def try_out(self) -> Pass:
        self.look()
        self.now += TRIAL
        return self.look()

    def vfs(self) -> str:
        return self.kernel.files.read(f"/sys/bus/pci/devices/{PF}/sriov_numvfs")


refuse_five = refusing(errno.ENOSPC, "sriov_numvfs 5")
