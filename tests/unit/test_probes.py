"""The probes there are, and what the spec knows of them."""

import pytest

from agent.probes import probes
from agent.spec.node import SpecError, from_mapping


def test_the_spec_takes_every_probe_by_its_module_s_name() -> None:
    settings: dict[str, object] = {probe.name: {"severity": "warn"} for probe in probes()}
    assert settings.keys() >= {"carrier", "clock", "nics"}
    spec = from_mapping({"node_name": "n1", "readiness": {"probes": settings}})
    assert spec.readiness.probes.keys() == settings.keys()


def test_the_spec_refuses_a_probe_that_there_is_not_with_the_nearest_one() -> None:
    with pytest.raises(SpecError, match=r"unknown probe 'carier'; did you mean 'carrier'\?"):
        from_mapping({"node_name": "n1", "readiness": {"probes": {"carier": {"severity": "warn"}}}})


def test_each_condition_is_one_probe_s_alone() -> None:
    types = [probe.type for probe in probes()]
    assert len(types) == len({*types, "Converged", "WorkerAlive"}) - 2


def test_defaults_can_be_met() -> None:
    assert all(1 <= probe.fail_after <= probe.of for probe in probes())
