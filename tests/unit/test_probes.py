"""The probes that exist, and their names in the spec."""

import pytest

from agent.probes import probes
from agent.spec.node import SpecError, from_mapping


def test_the_spec_takes_every_probe_by_its_module_s_name() -> None:
    settings: dict[str, object] = {probe.name: {"severity": "warn"} for probe in probes()}
    assert settings.keys() >= {"carrier", "clock", "nics"}
    spec = from_mapping({"node_name": "n1", "readiness": {"probes": settings}})
    assert spec.readiness.probes.keys() == settings.keys()


def test_an_unknown_probe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SpecError, match=r"unknown probe 'carier'; did you mean 'carrier'\?"):
        from_mapping({"node_name": "n1", "readiness": {"probes": {"carier": {"severity": "warn"}}}})


def test_each_condition_is_one_probe_s_alone() -> None:
    types = [probe.type for probe in probes()]
    assert len(types) == len({*types, "Converged", "WorkerAlive"}) - 2


def test_probes_defaults_are_possible() -> None:
    assert all(1 <= probe.fail_after <= probe.of for probe in probes())
