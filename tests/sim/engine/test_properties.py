"""For any two valid specs: after a pass with the first, a pass with the second leaves an empty plan."""

import json

from attrs import evolve
from hypothesis import given, settings

from agent.engine.dry_run import dry_run
from agent.report.records import to_plain
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from tests.sim.engine.test_faults import node, specs
from tests.sim.passes import settle


@settings(max_examples=60)
@given(specs, specs)
def test_from_any_spec_to_any_other_one_pass_leaves_nothing_to_change(first: NodeSpec, second: NodeSpec) -> None:
    kernel = node()
    for wanted in (first, second):
        result = settle(kernel, wanted)
        assert is_ready(result.conditions), result.conditions
        assert dry_run(kernel.machine(), wanted).changes == ()
    kernel.writes.clear()
    again = settle(kernel, second)
    assert (again.outcomes, kernel.writes) == ((), [])


@settings(max_examples=60)
@given(specs)
def test_the_order_in_which_a_spec_lists_its_nics_does_not_change_a_byte_of_the_plan(spec: NodeSpec) -> None:
    kernel = node()
    turned = evolve(spec, nics=spec.nics[::-1])
    plans = [json.dumps(to_plain(dry_run(kernel.machine(), wanted).changes)) for wanted in (spec, turned)]
    assert plans[0] == plans[1]
