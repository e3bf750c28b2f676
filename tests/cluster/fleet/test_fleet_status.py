"""`trackbed fleet status` against a real API server, with Nodes that are objects only."""

from pathlib import Path

import pytest

from agent.report import names
from lab.cluster.control_plane import ControlPlane
from tests.cluster.fleet.fleet_commands import conditions, fleet, make_node
from tests.cluster.objects import LEASES, manifest, patch_lease, patch_status


@pytest.mark.usefixtures("no_nodes")
def test_status_shows_every_node_and_its_exit_code_says_whether_all_are_ready(plane: ControlPlane) -> None:
    make_node(plane, "a")
    plane.apply(manifest("v1", "Node", "others"))
    done = fleet(plane, "status", "--json")
    assert done.code == 0
    (row,) = done.document["nodes"]
    assert (row["name"], row["ready"], row["spec_hash"]) == ("a", "True", "0123456789abcdef")
    assert (row["agent_version"], row["up_to_date"], row["reason"]) == ("0.1.0-abc", "True", "AsSpecified")
    assert done.document["other_nodes"] == 1
    make_node(plane, "b", ready="False")
    done = fleet(plane, "status")
    assert done.code == 2
    assert "1 of 2 nodes are ready; 1 other nodes" in done.out
    assert "AsSpecified: as it is" in done.out


@pytest.mark.usefixtures("no_nodes")
def test_a_heartbeat_in_the_nodes_own_wrong_time_counts(plane: ControlPlane) -> None:
    make_node(plane, "a")
    patch_lease(plane, "a", {"spec": {"renewTime": "1970-01-01T00:00:00.000000Z"}})
    assert fleet(plane, "sweep", "--json").document["expired"] == []


@pytest.mark.usefixtures("no_nodes")
def test_a_node_that_was_deleted_is_shown(plane: ControlPlane, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_node(plane, name)
    plane.kubectl("delete", "node", "a")
    plane.kubectl("delete", "leases", "a", LEASES)
    inventory = tmp_path / "inventory.py"
    inventory.write_text('hosts = [("host", {"node_name": "c"}), ("other", {"node_name": "a"})]\n')
    done = fleet(plane, "status", "--inventory", str(inventory), "--json")
    assert done.code == 2
    rows = {one["name"]: one["reason"] for one in done.document["nodes"] if not one["joined"]}
    assert rows == {"a": "NotJoined", "c": "NotJoined"}
    assert "its Node was deleted" in fleet(plane, "status", "--inventory", str(inventory)).out


ESCAPES = "\x1b[2J\x1b]0;mine\x07[bold red]"
# C1's CSI, OSC and NEL, and marks of writing direction.
MORE_ESCAPES = "\x9b2J\x9d0;mine\x9c\x85\u202e\u2066\u200f\u2028"


@pytest.mark.usefixtures("no_nodes")
def test_text_that_a_node_writes_is_escaped_on_the_terminal(plane: ControlPlane) -> None:
    make_node(plane, "a", ready="False")
    broken = [{**one, "reason": "Broken", "message": ESCAPES} for one in conditions("False")]
    patch_status(plane, "a", {"status": {"conditions": broken}})
    out = fleet(plane, "status").out
    assert "Broken: \\x1b[2J\\x1b]0;mine\\x07[bold red]" in out
    assert "\x1b" not in out
    # In every field that others write: the kubelet's condition, ours, and the Lease.
    make_node(plane, "b")
    lost = [{**one, "reason": MORE_ESCAPES, "message": MORE_ESCAPES, "status": "?"} for one in conditions("True")]
    lost = [one if one["type"] == "Ready" else {**one, "status": "True"} for one in lost]
    patch_status(plane, "b", {"status": {"conditions": lost}})
    notes = {names.SPEC_HASH: MORE_ESCAPES, names.AGENT_VERSION: MORE_ESCAPES}
    patch_lease(plane, "b", {"metadata": {"annotations": notes}})
    for done in (fleet(plane, "status"), fleet(plane, "status", "--json"), fleet(plane, "sweep", "--dry", "--json")):
        assert all(one.isprintable() or one == "\n" for one in done.out + done.err), done
    assert "\\x9b2J\\x9d0;mine\\x9c\\x85\\u202e\\u2066\\u200f\\u2028" in fleet(plane, "status").out
