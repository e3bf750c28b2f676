"""For any two specs of VFs: after a pass with the first, a pass with the second leaves an empty plan."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.engine.dry_run import dry_run
from agent.engine.originals import Originals
from agent.report.verdict import is_ready
from agent.spec.node import NodeSpec
from tests.sim.kinds.test_sriov import PF, made, spec
from tests.sim.passes import again, settle

pytestmark = pytest.mark.slow


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


@st.composite
def attributes(draw: st.DrawFn, index: int | None, largest: int) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "vlan": draw(optional(st.integers(0, 4094))),
        "trust": draw(optional(st.booleans())),
        "spoofchk": draw(optional(st.booleans())),
        "link_state": draw(optional(st.sampled_from(["auto", "enable", "disable"]))),
        "max_tx_rate": draw(optional(st.sampled_from([0, 500, 1000]))),
        "rss_query": draw(optional(st.booleans())),
        "txqueuelen": draw(optional(st.integers(1, 9999))),
        "mtu": draw(optional(st.sampled_from([mtu for mtu in (1500, 4200, 9000) if mtu <= largest]))),
        "driver": draw(optional(st.sampled_from(["netdevice", "vfio-pci"]))),
    }
    if drawn["vlan"] is not None:
        drawn["qos"] = draw(optional(st.integers(0, 7)))
        drawn["vlan_protocol"] = draw(optional(st.sampled_from(["802.1Q", "802.1ad"])))
    if drawn["max_tx_rate"] is not None:
        drawn["min_tx_rate"] = draw(optional(st.integers(0, 500)))
    if index is not None:
        drawn["node_guid"] = draw(optional(st.just(f"00:11:22:33:44:55:66:7{index}")))
    return {name: value for name, value in drawn.items() if value is not None}


@st.composite
def specs(draw: st.DrawFn) -> NodeSpec:
    count = draw(st.integers(0, 4))
    split = draw(st.integers(0, count))
    mtu = draw(st.sampled_from([1500, 9000]))
    groups = [{"index": str(index), **draw(attributes(index, mtu))} for index in range(split)]
    more: dict[str, Any] = {"mtu": mtu, "altnames": draw(st.sampled_from([[], ["a"], ["b", "a"]]))}
    return spec({"count": count, "groups": groups, "defaults": draw(attributes(None, mtu))}, **more)


@settings(max_examples=60)
@given(specs(), specs())
def test_after_any_spec_any_other_leaves_nothing_to_change(first: NodeSpec, second: NodeSpec) -> None:
    kernel, originals = made(), Originals()
    kernel.sriov.able.add(PF)
    for wanted in (first, second):
        result = settle(kernel, wanted, originals=originals)
        # A rate that only the other spec gave may stand in the way of one that is left alone now: said, not hidden.
        stuck = [o for o in result.outcomes if o.result != "applied"]
        assert all(o.change.field == "max_tx_rate" and "set that as well" in o.error for o in stuck), stuck
        assert is_ready(result.conditions) is not bool(stuck)
        left = dry_run(kernel.machine(), wanted, originals).changes
        assert [(c.target, c.field) for c in left] == [(o.change.target, o.change.field) for o in stuck]
        if not stuck:
            assert again(kernel, wanted, originals=originals) == ([], ())
