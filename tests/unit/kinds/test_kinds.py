"""What the modules of agent/kinds/ declare."""

import importlib
import pkgutil
from types import ModuleType

import pytest
from attrs import fields

import agent.kinds
from agent.hardware.topology import Topology
from agent.kinds import Kind, Observer, by_name, declared, ordered
from agent.report.records import Change, Numbers, to_plain, value_from_plain
from agent.spec.node import from_mapping
from agent.state.snapshot import Memo, Snapshot
from agent.state.wanted import Wanted


def test_observers_make_no_changes() -> None:
    observers = {each.NAME for each in ordered() if not isinstance(each, Kind)}
    assert observers == {"queues", "rdma", "vf_drivers"}
    assert not observers & by_name().keys()


def test_a_module_that_plans_and_cannot_apply_is_refused() -> None:
    module = ModuleType("half")
    module.__dict__.update(NAME="half", observe=dict, plan=list)
    with pytest.raises(TypeError, match="apply"):
        declared(module)


def test_parts_that_a_module_leaves_out_have_a_default() -> None:
    module = ModuleType("observe_only")
    module.__dict__.update(NAME="observe_only", observe=dict)
    record = declared(module)
    assert type(record) is Observer
    assert record.read_for(Wanted(from_mapping({"node_name": "n1"}))) is None


def test_numbers_that_are_set_in_one_step_are_a_mapping_in_the_report() -> None:
    change = Change(
        "rings", "0000:41:00.0", "rings", Numbers.of({"tx": None, "rx": 64}), Numbers.of({"rx": 256, "tx": 512})
    )
    plain = to_plain(change)
    assert plain["before"] == {"rx": 64, "tx": None}
    assert plain["after"] == {"rx": 256, "tx": 512}
    assert value_from_plain(plain["before"]) == change.before
    assert str(change) == "rings 0000:41:00.0 rings: rx=64 tx=none -> rx=256 tx=512"


@pytest.mark.parametrize("value", [{"rx": "4"}, {"rx": True}, {"rx": 1.5}, ["rx"]])
def test_an_invalid_value_of_a_change_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="value"):
        value_from_plain(value)


def test_a_result_is_computed_again_only_for_other_input() -> None:
    memo, made = Memo(), []

    def result(text: str) -> int:
        made.append(text)
        return len(text)

    assert [memo.get("length", (text,), lambda text=text: result(text)) for text in ("a", "a", "bc")] == [1, 1, 2]  # type: ignore[misc]
    assert made == ["a", "bc"]


def test_snapshots_made_of_one_another_share_results_and_others_do_not() -> None:
    first = Snapshot((), Topology({}, frozenset(), {}))
    assert first.merged("irqs", None, {}).memo is first.memo
    assert Snapshot((), Topology({}, frozenset(), {})).memo is not first.memo


def test_no_kind_has_a_part_that_its_module_only_imports() -> None:
    names = [module.name for module in pkgutil.walk_packages(agent.kinds.__path__, "agent.kinds.")]
    modules = [module for name in names if hasattr(module := importlib.import_module(name), "plan")]
    for kind in map(declared, modules):
        parts = [getattr(kind, part.name) for part in fields(type(kind))]
        own = (f"agent.kinds.{kind.NAME}", f"agent.kinds.host.{kind.NAME}", "agent.kinds")
        foreign = [part for part in parts if callable(part) and part.__module__ not in own]
        assert foreign == [], kind.NAME
