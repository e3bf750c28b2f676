"""The ends of a node in the fabric test, from the output of its agent; and the keys of the test's settings."""

import contextlib
import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.exceptions import DeployError
from pyinfra.api.state import StateStage
from pyinfra.context import ctx_host, ctx_state

from agent.report.fabric import RESULTS_FILE, results_from_json
from agent.spec.node import from_mapping
from fleet.fabric.journal import Journal
from fleet.fabric.tests import FabricSettings
from tasks import fabric
from tasks.common import archive
from tasks.fabric.ends import FACTS, NodeEnds, ends_of, read_ends
from tests.deploy.conftest import DEBIAN, Node, state_of
from tests.deploy.examples.inventories import inventory_of
from tests.deploy.packages.test_packages import install
from tests.deploy.systems import dpkg
from tests.stand_ins import program


def gid(index: int, type: str, address: str) -> dict[str, Any]:
    return {"index": index, "type": type, "address": address, "netdev": "ens1f0v0"}


def device(name: str, state: str = "ACTIVE", gids: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    link = {"link_layer": "Ethernet", "rate": "10 Gb/sec (4X)", "netdev": "v0"}
    port = {"number": 1, "state": state, "gids": gids, **link}
    return {"name": name, "transport": "RoCE", "firmware": "1.2", "node_guid": "0a:0b", "ports": [port]}


GIDS = (
    *(gid(0, "RoCE v1", "fe80::1"), gid(1, "RoCE v2", "fe80::1"), gid(2, "RoCE v1", "10.0.0.1")),
    *(gid(3, "RoCE v2", "fd00::1"), gid(5, "RoCE v2", "10.0.0.1")),
)


def function(address: str, nic: str | None, rdma: list[dict[str, Any]], vfs: list[dict[str, Any]]) -> dict[str, Any]:
    ids = {"vendor": "8086", "device": "10c9", "driver": "igb", "firmware": "9", "numa_node": 1, "netdevs": []}
    return {"address": address, "nic": nic, "rdma": rdma, "vfs": vfs, **ids}


def printed(*functions: dict[str, Any]) -> list[str]:
    cpus = [f"cpus {owner['address']} 4-7 SRC" for one in functions for owner in (one, *one["vfs"])]
    own = ("program mpirun", "program mpi4py", "ipv6", "address 10.0.0.1", "address fd00::1")
    return [*own, *cpus, "gpu 0000:3b:00.0 1", "inspection", json.dumps({"functions": functions})]


FAB0 = function("0000:21:00.0", "fab0", [device("rx0", gids=GIDS)], [])
FAB1_DOWN = function("0000:41:00.0", "fab1", [device("rx1", "DOWN", GIDS)], [])


def kept(folder: Path) -> Journal:
    """What a test's deploy has noted in its state."""
    return Journal.read(folder / "state/trackbed/fabric/results.jsonl")


def ends(*functions: dict[str, Any]) -> list[Any]:
    return ends_of("n1", NodeEnds.parse(printed(*functions)), {"fab1": 7}, {"ib_write_bw": 90.0})[0]


def test_an_end_is_the_device_of_the_nic_itself_with_the_gid_of_its_ipv4_address() -> None:
    (end,) = ends(FAB0)
    assert (end.name, end.device, end.address, end.gid_index, end.cpus) == ("n1/fab0", "rx0", "10.0.0.1", 5, "4-7")
    assert end.programs == ("mpi4py", "mpirun")
    assert (end.gpu, end.rail, dict(end.floors)) == ("0000:3b:00.0", 0, {"ib_write_bw": 90.0})
    assert end.identity == {"driver": "igb SRC", "firmware": "1.2", "port": "0a:0b Ethernet 10 Gb/sec (4X)"}


def test_the_client_s_address_has_the_name_that_the_node_s_perftest_knows() -> None:
    for line, option in ((), "--source_ip"), (("source --bind_source_ip",), "--bind_source_ip"):
        assert ends_of("n1", NodeEnds.parse([*line, *printed(FAB0)]), {}, {})[0][0].source_option == option


def test_without_a_device_of_its_own_it_is_the_first_vf_that_can_be_reached() -> None:
    down = function("0000:41:10.0", "fab1", [device("rx1", "DOWN", GIDS)], [])
    without = function("0000:41:10.2", "fab1", [device("rx2", gids=GIDS[:2])], [])
    usable = function("0000:41:10.4", "fab1", [device("rx3", gids=GIDS[:4])], [])
    (end,) = ends(function("0000:41:00.0", "fab1", [], [down, without, usable]))
    assert (end.name, end.pci, end.address, end.gid_index, end.rail) == ("n1/fab1", "0000:41:10.4", "fd00::1", 3, 7)


def test_a_vf_whose_address_is_a_pods_is_not_tested() -> None:
    in_a_pod = function("0000:41:10.0", "fab1", [device("rx1", gids=(gid(3, "RoCE v2", "10.244.1.7"),))], [])
    usable = function("0000:41:10.2", "fab1", [device("rx2", gids=GIDS)], [])
    (end,) = ends(function("0000:41:00.0", "fab1", [], [in_a_pod, usable]))
    assert (end.device, end.address) == ("rx2", "10.0.0.1")
    with pytest.raises(ValueError, match="no NIC of its spec has"):
        read_ends("n1", printed(function("0000:41:00.0", "fab1", [], [in_a_pod])), {}, {}, ())


def test_a_nic_with_ipv6_addresses_alone_needs_a_perftest_that_can_use_them() -> None:
    lines = printed(function("0000:21:00.0", "fab0", [device("rx0", gids=GIDS[:4])], []))
    (end,), _ = read_ends("n1", lines, {}, {}, ())
    assert end.address == "fd00::1"
    lines.remove("ipv6")
    with pytest.raises(ValueError, match=r"fab0: it has only IPv6 addresses, which need perftest 23\.07 or newer"):
        read_ends("n1", lines, {}, {}, ())


def test_a_nic_that_cannot_be_tested_is_named_and_the_others_of_the_node_are_tested() -> None:
    lines = printed(
        FAB0,
        FAB1_DOWN,
        function("0000:61:00.0", "storage", [device("rx2", "DOWN", GIDS)], []),
        function("0000:81:00.0", "v6", [device("rx3", gids=GIDS[:4])], []),
    )
    lines.remove("ipv6")
    (end,), untested = read_ends("n1", lines, {}, {}, ("fab{index}", "v6"))
    assert end.nic == "fab0"
    assert untested.keys() == {"fab1", "v6"}
    assert untested["fab1"].startswith("none of its RDMA devices ")
    assert untested["v6"].startswith("it has only IPv6 addresses")


def test_the_node_says_what_its_perftest_can_do(tmp_path: Path) -> None:
    for name, text in (("agent", "echo '{}'"), ("ib_send_bw", "echo ' --ipv6-addr (SYMMETRIC) Use IPv6' >&2; exit 1")):
        program(tmp_path / name, text)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", "-eu", "-c", FACTS, "sh", str(tmp_path / "agent")]
    said = subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert (NodeEnds.parse(said)["ipv6"], NodeEnds.parse(said)["source_option"]) == (True, "--source_ip")
    assert NodeEnds.parse(said)["addresses"] >= {"127.0.0.1"}


def test_other_functions_are_not_tested_and_a_node_without_an_agent_is_named() -> None:
    assert ends(function("0000:21:00.0", None, [device("rx0", gids=GIDS)], [])) == []
    with pytest.raises(ValueError, match=r"no agent of Trackbed; run deploy\.py first"):
        NodeEnds.parse([])


@pytest.mark.parametrize(
    "address",
    ["--out_json_file=/x", "10.0.0.1\n  ProxyCommand id", "fd00::1%\n  ProxyCommand id", "10.0.0.1,10.0.0.2", ""],
)
@pytest.mark.parametrize("transport", ["RoCE", "InfiniBand"])
def test_an_address_that_stands_on_other_nodes_command_lines_is_one(address: str, transport: str) -> None:
    made_up = device("rx0", gids=(gid(0, "RoCE v2", address),)) | {"transport": transport}
    owner = function("0000:21:00.0", "fab0", [made_up], []) | {"netdevs": [{"addresses": [address]}]}
    with pytest.raises(ValueError, match=r"scope|IPv4 or IPv6"):
        read_ends("n1", printed(owner), {}, {}, ())


@pytest.mark.parametrize(
    "answer",
    [
        "5", "[]", "{}", "[" * 100_000, '{"functions": 5}', '{"functions": [5]}', '{"functions": [{}]}',
        '{"functions": [{"nic": "a", "vfs": [], "rdma": [{"ports": [{"state": "ACTIVE"}]}]}]}', '{"functions": null}', "",
    ],
)  # fmt: skip
def test_an_answer_that_is_nonsense_is_that_nodes_fault(answer: str) -> None:
    with pytest.raises(ValueError):
        read_ends("n1", ["cpus 0000:21:00.0", "gpu", "program", "source", "inspection", answer], {}, {}, ("a",))


def test_cpus_are_a_list_of_cpus() -> None:
    lines = printed(FAB0)
    (end,), _ = read_ends("n1", [line.replace("4-7", ":") for line in lines], {}, {}, ())
    assert end.cpus == ""


def test_settings_are_read() -> None:
    read = fabric.FABRIC.read({"fabric": {"tests": ["ib_read_bw"], "across_rails": False, "at_once": 1}}, "n1")
    assert read == FabricSettings(tests=("ib_read_bw",), across_rails=False, at_once=1)


def test_of_all_rdma_programs_perftest_alone_is_installed_for_a_test(node: Node) -> None:
    result = node.deploy(fabric.prepare, {**DEBIAN, **dpkg()})
    assert result.planned == {"perftest": True}
    assert result.flat == [install("perftest")]


def prove() -> None:
    fabric.prove(spec=from_mapping({"node_name": "node-a"}))


def test_a_deploy_writes_its_results_to_the_node(node: Node, tmp_path: Path) -> None:
    result = node.deploy(prove, {"inspect --json": printed(FAB0)})
    journal = kept(tmp_path)
    assert [end.device for end in journal.run.ends] == ["rx0"]
    assert journal.ended is not None
    # There is no other node to test it with, so it is not good.
    (seen,) = results_from_json(result.uploads[RESULTS_FILE.replace("fabric.json", ".fabric.json.new")].decode()).nics
    assert (seen.pci, seen.good, seen.identity) == ("0000:21:00.0", False, journal.run.ends[0].identity)
    assert result.failed
    assert any("no other node has a NIC of this rail" in line for line in result.log)


def prove_rdma(required: bool) -> None:
    nics = [
        {"name": name, "select": {"netdev": name}, "rdma": {"pf": True}, "required": needed}
        for name, needed in (("fab0", True), ("fab1", required))
    ]
    fabric.prove(spec=from_mapping({"node_name": "node-a", "nics": nics}))


@pytest.mark.parametrize("required", [True, False])
def test_a_required_nic_that_was_not_tested_fails_the_deploy_and_is_in_the_results(
    node: Node, tmp_path: Path, required: bool
) -> None:
    result = node.deploy(partial(prove_rdma, required), {"inspect --json": printed(FAB0, FAB1_DOWN)})
    assert [*kept(tmp_path).run.absent] == (["@fake/node-a/fab1"] if required else [])
    assert result.failed
    said = any("fab1 was not tested: none of its RDMA devices has an active port" in line for line in result.log)
    assert said == required


@pytest.mark.parametrize(("limit", "refused"), [(("b", "c"), False), (("a", "b"), True), ((), True)])
def test_only_hosts_that_are_tested_together_need_the_same_settings(limit: tuple[str, ...], refused: bool) -> None:
    settings = {name: {"fabric": {"size": size}} for name, size in (("a", 512), ("b", 4096), ("c", 4096))}
    state = state_of(settings.items())
    if limit:
        state.limit_hosts = [state.inventory.get_host(name) for name in limit]
    state.set_stage(StateStage.Prepare)
    expected = pytest.raises(DeployError, match="give all hosts the same") if refused else contextlib.nullcontext()
    with ctx_state.use(state), ctx_host.use(state.inventory.get_host("b")), expected:
        prove()


def test_the_floors_of_the_profile_are_those_of_its_nodes_ends(node: Node, tmp_path: Path) -> None:
    fleet = inventory_of(archive.ROOT / "inventories" / "prod.py")
    floors = {name: fleet.get_host(name).data.get("fabric_floors") for name in ("gpu-01.example.net", "10.0.1.11")}
    assert floors == {"gpu-01.example.net": {"ib_write_bw": 360}, "10.0.1.11": None}
    node.data["fabric_floors"] = floors["gpu-01.example.net"]
    node.deploy(prove, {"inspect --json": printed(FAB0)})
    (end,) = kept(tmp_path).run.ends
    assert end.floors == {"ib_write_bw": 360.0}


def test_a_node_without_an_agent_is_a_result(node: Node, tmp_path: Path) -> None:
    result = node.deploy(prove, {})
    assert list(kept(tmp_path).run.absent) == ["@fake/node-a"]
    assert result.failed
