"""What the commands of the fleet print, and which arguments they refuse."""

import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from lightkube import Client, KubeConfig
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node

from agent.report import names
from agent.report.age import say_age
from fleet.api import Api
from fleet.commands.status import print_nodes
from fleet.reading import read_all
from fleet.standing import Standing, standing
from tests.http_server import Request, serving
from tests.unit.fleet.nodes_api import Cluster
from tests.unit.fleet.test_fleet import NOW, lease, node
from tests.unit.fleet.test_kubeconfig import KUBECONFIG, TIME, kubeconfig, server, trackbed
from tests.unit.reporter.scripted import merged


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0s"), (59, "59s"), (61, "1m1s"), (3600, "1h"), (7265, "2h1m"), (90000, "1d1h")]
)
def test_an_age_has_two_units(seconds: float, said: str) -> None:
    assert say_age(seconds) == said


@pytest.fixture
def empty_cluster(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The option for the kubeconfig of a cluster without Nodes."""
    with server(TIME % "[]") as (url, _):
        yield "--kubeconfig", str(kubeconfig(tmp_path, url))


def test_a_cluster_without_a_node_of_trackbeds_is_not_ready(empty_cluster: tuple[str, str]) -> None:
    shown, listed = trackbed("status", *empty_cluster), trackbed("status", *empty_cluster, "--json")
    assert (shown.returncode, listed.returncode, json.loads(listed.stdout)["ready"]) == (2, 2, False)
    assert shown.stdout.startswith("0 of 0 nodes are ready")
    assert "is it the right cluster?" in shown.stderr


def test_a_node_with_fields_that_another_version_of_kubernetes_has_is_shown(tmp_path: Path) -> None:
    """Fields of alpha features change their types: this one is a list in 1.37."""
    later = merged(node("a").to_dict(), {"status": {"declaredFeatures": {"a": 1}}, "spec": {"podCIDRs": 1}})

    def answer(request: Request) -> tuple[int, Any]:
        return Cluster({"a": later}).answer(request.method, request.path, None)

    with serving(answer) as url:
        (shown,) = json.loads(trackbed("status", "--kubeconfig", str(kubeconfig(tmp_path, url)), "--json").stdout)[
            "nodes"
        ]
    # No reporter has a Lease here.
    assert (shown["name"], shown["reason"]) == ("a", names.EXPIRED)


def test_a_limit_is_of_an_inventory(empty_cluster: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "fleet.py").write_text('a = ["n1", "n2"]\nb = ["n3"]\n')
    words = ("status", *empty_cluster, "--limit", "a")
    refused, shown = trackbed(*words), trackbed(*words, "--inventory", str(tmp_path / "fleet.py"), "--json")
    assert (refused.returncode, "give --inventory, too" in refused.stderr) == (1, True)
    assert [one["name"] for one in json.loads(shown.stdout)["nodes"]] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("inventory", "options", "said"),
    [
        (True, ("--resume", "--undo"), "--resume and --undo exclude each other"),
        (True, ("--device", "rail0", "--at-once", "2"), "--device is for one node after the other"),
        (True, ("--allow", "explode"), "'explode' is not one of 'none', 'rebind', 'link-flap'"),
        (False, (), "--inventory is missing"),
    ],
)
def test_wrong_options_of_a_maintenance_are_refused(
    empty_cluster: tuple[str, str], tmp_path: Path, inventory: bool, options: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "fleet.py"
    file.write_text("hosts = []\n")
    given = ("--inventory", str(file)) if inventory else ()
    refused = trackbed("maintain", "gpu-01", *empty_cluster, *given, *options)
    assert (refused.returncode, refused.stdout, said in refused.stderr) == (1, "", True)


def test_a_maintenance_names_a_server_that_answers_with_a_page_for_a_login(tmp_path: Path) -> None:
    cluster = Cluster({})

    def answer(request: Request) -> tuple[int, Any]:
        of_node = request.path == "/api/v1/nodes/a"
        return (200, "<html>please log in") if of_node else cluster.answer(request.method, request.path, None)

    (tmp_path / "fleet.py").write_text('hosts = ["a"]\n')
    with serving(answer) as url:
        options = ("--kubeconfig", str(kubeconfig(tmp_path, url)), "--inventory", str(tmp_path / "fleet.py"))
        refused = trackbed("maintain", "a", *options)
    assert (refused.returncode, f"{url} gives no answer" in refused.stderr) == (1, True)


def test_undo_needs_no_inventory_and_says_that_nothing_is_recorded(empty_cluster: tuple[str, str]) -> None:
    undone = trackbed("maintain", "gpu-01", *empty_cluster, "--undo")
    assert (undone.returncode, undone.stderr) == (0, "")
    assert undone.stdout == "gpu-01: no maintenance is recorded, and it is not cordoned\n"


@pytest.mark.slow
def test_every_command_has_an_example_its_exit_codes_and_json() -> None:
    said = dict(helps())
    assert {("status",), ("sweep",), ("fabric", "report")} <= set(said)
    for command, text in said.items():
        assert "Example: trackbed fleet" in text, command
        assert "Exit code: 0" in text, command
        assert "--json" in text, command


def helps(*group: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The help of each command, by its words; a group of commands is not one of them."""
    text = trackbed(*group, "--help").stdout
    listed = text.partition("Commands:\n")[2].splitlines()
    if not listed:
        yield group, text
    for line in listed:
        if line[:2] == "  " and line[2:3].strip():
            yield from helps(*group, line.split()[0])


def test_the_table_uses_the_words_of_trackbed_status(capsys: pytest.CaptureFixture[str]) -> None:
    warned = node("a", message="the node is as its spec says, with 1 warning: ClockSynchronised")
    dark = node("b", ready="False", reason="NoCarrier", message="no carrier")
    # The device plugin of d does not run, say, so it gets no new pods.
    there = {"a": warned, "b": dark, "d": node("d", taints=(names.TAINT,))}
    nodes = [*(standing(name, of, lease(name), NOW) for name, of in there.items()), standing("c", None, None, NOW)]
    print_nodes(nodes, NOW, others=0, shut_out={})
    heading, *rows, last = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["NODE", "READY", "SINCE"]
    assert [re.split("  +", row)[1] for row in rows] == ["ready", "not ready", "ready", "unknown"]
    assert "with 1 warning: ClockSynchronised" in rows[0]
    assert "NoCarrier: no carrier" in rows[1]
    assert ["tainted (why: trackbed status" in row for row in rows] == [False, False, True, False]
    assert last == "2 of 4 nodes are ready"


def test_who_is_shut_out_is_named_also_without_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    shut_out = {"gone": "its disk was stolen", "a": "\x1b[2Jmalware"}
    print_nodes([standing("a", node("a"), lease(), NOW)], NOW, others=0, shut_out=shut_out)
    *_, counted, first, second = capsys.readouterr().out.splitlines()
    assert counted == "1 of 1 nodes are ready"
    assert first.startswith("a is shut out (") and "\x1b" not in first
    assert second.startswith("gone is shut out (its disk was stolen); ")


@pytest.mark.parametrize(
    ("status", "body", "shut_out"),
    [
        (200, '{"metadata": {}, "data": {"gone": "stolen"}}', {"gone": "stolen"}),
        (200, '{"metadata": {}}', {}),
        (404, '{"kind": "Status", "code": 404, "reason": "NotFound", "message": "not found"}', {}),
        (403, '{"kind": "Status", "code": 403, "reason": "Forbidden", "message": "forbidden"}', None),
    ],
)
def test_who_is_shut_out_is_read_from_the_cluster(status: int, body: str, shut_out: dict[str, str] | None) -> None:
    with server(body, status) as (url, _):
        config = yaml.safe_load(KUBECONFIG.replace("https://127.0.0.1:1", url))
        assert Api(Client(KubeConfig.from_dict(config).get()), "", NOW).shut_out() == shut_out


def dark(name: str) -> Standing:
    message = "no carrier on rail0; " + "is the cable in its port? " * 40
    return standing(name, node(name, ready="False", reason="NoCarrier", message=message), lease(name), NOW)


@pytest.mark.parametrize("width", [40, 80, 120, 400])
def test_on_a_terminal_of_any_width_nothing_of_a_node_is_cut_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    name = "gpu-0001.rack-12.example.net"
    print_nodes([dark(name), dark("long." * 50)], NOW, others=0, shut_out={})
    printed = click.unstyle(capsys.readouterr().out)
    assert re.search(rf"^{name}  not ready  ", printed, re.MULTILINE)
    assert " ".join(dark(name).message.split()) in " ".join(printed.split())
    assert max(len(line) for line in printed.splitlines() if "cable" in line) <= width


def test_in_a_pipe_each_node_is_one_line_without_spaces_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    long = "long." * 50
    print_nodes(
        [dark("a"), standing("b", None, None, NOW), standing(long, None, None, NOW)], NOW, others=0, shut_out={}
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["NODE", "a", "b", long, "0"]
    assert [line.find(word) for line, word in zip(lines, ("READY", "not ready", "unknown"), strict=False)] == [6] * 3
    assert dark("a").message.rstrip() in lines[1]
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_list_of_thousands_of_nodes_does_not_keep_their_images() -> None:
    def node_with_images(number: int) -> dict[str, object]:
        images = [{"names": [f"registry/{number}/{each}@sha256:{each:064}"], "sizeBytes": each} for each in range(50)]
        fields: dict[str, object] = {"f:status": {"f:conditions": {f"f:{number}-{each}": {} for each in range(50)}}}
        managers = [{"manager": "kubelet", "time": "2026-01-01T00:00:00Z", "fieldsV1": fields}]
        return {"metadata": {"name": f"n{number}", "managedFields": managers}, "status": {"images": images}}

    many = 300
    tracemalloc.start()
    try:
        nodes = read_all(map(node_with_images, range(many)), Node)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert (len(nodes.objects), nodes.faults) == (many, {})
    # With their images and field managers, each takes ten times as much.
    assert kept / many < 3000


@pytest.mark.parametrize("time", ["renewTime", "acquireTime"])
def test_any_time_of_a_lease_that_cannot_be_read_is_a_fault(time: str) -> None:
    """The API server would let its reporter not renew it, so a sweep mends it."""
    lease = {"metadata": {"name": "a"}, "spec": {time: "10000-01-01T00:00:00.000000Z"}}
    assert list(read_all([lease], Lease).faults) == ["a"]
