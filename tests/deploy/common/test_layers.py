"""Overrides of parts of a value, merged layer over layer in pyinfra's order."""

from typing import Any

from tasks.common import layers
from tasks.common.layers import Layer
from tasks.node_spec import node_spec
from tests.deploy.conftest import state_of

RAILS = [{"name": f"rail{each}", "select": {"pci": f"0000:{each}8:00.0"}, "vfs": {"count": 8}} for each in range(3)]


def merged(
    host: dict[str, Any], every: dict[str, Any] | None = None, **groups: dict[str, Any]
) -> tuple[Any, list[str]]:
    """The data of a host of these groups, of which the last one counts, and what is wrong with its overrides."""
    made = state_of([("a", host)], every, **{name: (["a"], data) for name, data in groups.items()})
    one = made.inventory.get_host("a")
    faults = layers.merge(one)
    return one.data.dict(), faults  # type: ignore[no-untyped-call]


def test_one_odd_slot_repeats_nothing() -> None:
    odd = {"rail1": {"select": {"pci": "0000:9d:00.0"}, "vfs": {"defaults": {"trust": True}}}}
    data, faults = merged({"nic_overrides": odd}, rails={"nics": RAILS})
    assert faults == []
    assert data["nics"] == [
        RAILS[0],
        {"name": "rail1", "select": {"pci": "0000:9d:00.0"}, "vfs": {"count": 8, "defaults": {"trust": True}}},
        RAILS[2],
    ]
    # Also for the checks of the spec and of all keys.
    assert [nic.select.pci for nic in node_spec(data, "a").nics][1] == "0000:9d:00.0"


def test_none_removes_a_part() -> None:
    odd = {"rail0": {"select": {"pci": None, "mac": "02:00:00:00:00:01"}}, "rail2": None}
    data, _ = merged({"nic_overrides": odd}, rails={"nics": RAILS})
    assert [nic["select"] for nic in data["nics"]] == [{"mac": "02:00:00:00:00:01"}, {"pci": "0000:18:00.0"}]


def test_each_layer_is_over_those_before_and_a_key_replaces_them_all() -> None:
    first = {"sysctls": {"a": "1", "b": "1"}, "sysctls_overrides": {"b": "2", "c": "2"}}
    later: dict[str, Any] = {"sysctls_overrides": {"c": "3", "d": "3"}}
    assert merged({"sysctls_overrides": {"d": "4"}}, first, later=later)[0]["sysctls"] == {
        "a": "1",
        "b": "2",
        "c": "3",
        "d": "4",
    }
    # A host's own value is of a later layer than its groups' overrides.
    assert merged({"sysctls": {"z": "9"}}, first, later=later)[0]["sysctls"] == {"z": "9"}


def test_overrides_of_a_key_of_the_site_s_own_are_another_such_key_for_the_deploy_and_for_what_explains_it() -> None:
    given = {"site_rack": {"row": 7}, "site_rack_overrides": {"row": 8}}
    data, faults = merged(given)
    assert (data, faults) == (given, [])
    assert layers.value_of("site_rack", [Layer("host", given)]).value == {"row": 7}


def test_a_mapping_in_a_mapping_is_merged_and_a_list_replaced() -> None:
    given: dict[str, Any] = {"labels": {"policy": {"rack": "b7", "team": "ml"}, "capabilities": ["rdma"]}}
    data, _ = merged({"labels_overrides": {"policy": {"team": "hpc"}, "capabilities": []}}, given)
    assert data["labels"] == {"policy": {"rack": "b7", "team": "hpc"}, "capabilities": []}
    assert merged({"irqs_overrides": {"pin": False}})[0]["irqs"] == {"pin": False}
    assert given["labels"]["policy"]["team"] == "ml"


def test_an_empty_override_has_given_nothing() -> None:
    every = Layer("group all", {"nics": RAILS, "sysctls": {}})
    own: dict[str, Any] = {"nic_overrides": {"rail0": {"vfs": {}, "rdma": {}}}}
    value = layers.value_of("nics", [every, Layer("host", own)])
    assert {path for path, (layer, _) in value.given.items() if layer.name == "host"} == {("rail0", "rdma")}
    assert value.given[("rail0", "vfs", "count")] == (every, "nics")
    of_sysctls = layers.value_of("sysctls", [every, Layer("host", {"sysctls_overrides": {}})])
    assert of_sysctls.given == {(): (every, "sysctls")}
