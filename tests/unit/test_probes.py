"""The probes there are, and what the spec knows of them."""

from agent.probes import probes
from agent.spec.node import PROBES


def test_the_spec_knows_every_probe_by_its_module_s_name() -> None:
    assert {probe.name for probe in probes()} == PROBES


def test_each_condition_is_one_probe_s_alone() -> None:
    types = [probe.type for probe in probes()]
    assert len(types) == len({*types, "Converged", "WorkerAlive"}) - 2


def test_defaults_can_be_met() -> None:
    assert all(1 <= probe.fail_after <= probe.of for probe in probes())
