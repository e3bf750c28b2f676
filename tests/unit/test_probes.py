"""The probes that exist, and their names in the spec."""

from agent.probes import probes
from agent.spec.node import PROBES


def test_the_spec_knows_the_probes_that_exist_and_no_other() -> None:
    assert sorted(PROBES) == [probe.name for probe in probes()]


def test_each_condition_is_one_probe_s_alone() -> None:
    types = [probe.type for probe in probes()]
    assert len(types) == len({*types, "Converged", "WorkerAlive"}) - 2


def test_probes_defaults_are_possible() -> None:
    assert all(1 <= probe.fail_after <= probe.of for probe in probes())
