"""What a drain evicts, what a maintenance records, and how an inventory's hosts are found."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer

import pytest
from lightkube.models.core_v1 import (
    Container,
    EmptyDirVolumeSource,
    NodeCondition,
    NodeStatus,
    PodCondition,
    PodSpec,
    PodStatus,
    Toleration,
    Volume,
)
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.core_v1 import Node, Pod

from agent.report import names
from fleet.api import Failed
from fleet.eviction import MIRROR, Rules, drain
from fleet.inventory import Inventory
from fleet.maintenance_record import Record, record_of
from fleet.objects import CHANGED, unready
from tests.unit.fleet.test_fleet import node

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def pod(
    name: str,
    owner: str | None = "ReplicaSet",
    phase: str = "Running",
    annotations: dict[str, str] | None = None,
    emptydir: EmptyDirVolumeSource | None = None,
    ending: bool = False,
    controller: bool | None = True,
) -> Pod:
    owners = [OwnerReference(apiVersion="v1", kind=owner, name="o", uid="u", controller=controller)] if owner else None
    deleted = NOW if ending else None
    metadata = ObjectMeta(name=name, namespace="ml", uid=f"u-{name}", labels={"app": name}, annotations=annotations)
    metadata.ownerReferences, metadata.deletionTimestamp = owners, deleted
    volumes = [Volume(name="scratch", emptyDir=emptydir)] if emptydir else None
    spec = PodSpec(containers=[Container(name="c")], volumes=volumes)
    ready = [PodCondition("True", "Ready")] if phase == "Running" else []
    return Pod(metadata=metadata, spec=spec, status=PodStatus(phase=phase, conditions=ready))


@pytest.mark.parametrize(
    ("one", "evicted"),
    [
        (pod("job"), True),
        (pod("pending", phase="Pending"), True),
        # It is waited for, and forbids no drain.
        (pod("bare", owner=None, ending=True), True),
        *((pod("a", emptydir=EmptyDirVolumeSource(medium=medium)), True) for medium in ("Memory", "HugePages-2Mi")),
        (pod("plugin", owner="DaemonSet"), False),
        (pod("static", owner="Node", annotations={MIRROR: "x"}), False),
        (pod("done", phase="Succeeded"), False),
        (pod("failed", phase="Failed"), False),
    ],
)
def test_daemons_static_and_finished_pods_stay(one: Pod, evicted: bool) -> None:
    planned = drain([one], Rules())
    assert (len(planned.evict), planned.blockers) == (evicted, ())


EVERYTHING, CORDON = Toleration(operator="Exists"), "node.kubernetes.io/unschedulable"
OF_CORDON = Toleration(key=CORDON, operator="Exists", effect="NoSchedule")


@pytest.mark.parametrize(
    ("toleration", "age", "evicted"),
    [
        (EVERYTHING, -1, False),
        (EVERYTHING, 1, True),
        (OF_CORDON, -1, False),
        (OF_CORDON, 1, True),
        (Toleration(key=CORDON), -1, False),
        (Toleration(key=CORDON, value="x"), -1, True),
        (Toleration(key=CORDON, operator="Exists", effect="NoExecute"), -1, True),
        (Toleration(key="example.net/busy", operator="Exists"), -1, True),
        (None, -1, True),
    ],
)
def test_a_pod_that_comes_back_to_a_cordoned_node_stays(
    toleration: Toleration | None, age: float, evicted: bool
) -> None:
    """Otherwise it would be evicted every two seconds until the time is over, as a network's operator that runs anywhere."""
    one = pod("operator", owner="ReplicaSet")
    assert one.spec and one.metadata
    one.spec.tolerations = [toleration] if toleration else None
    one.metadata.creationTimestamp = NOW - timedelta(seconds=age)
    assert len(drain([one], Rules(), NOW).evict) == evicted


BARE, SCRATCH = Rules(force=True), Rules(delete_emptydir_data=True)


@pytest.mark.parametrize(
    ("one", "why", "rules"),
    [
        (pod("bare", owner=None), "ml/bare has no controller", BARE),
        # An owner that is not the controller starts no pod again.
        (pod("bare", owner="ConfigMap", controller=None), "ml/bare has no controller", BARE),
        (pod("bare", owner="ConfigMap", controller=False), "ml/bare has no controller", BARE),
        (pod("a", emptydir=EmptyDirVolumeSource()), "emptyDir scratch", SCRATCH),
        (pod("a", emptydir=EmptyDirVolumeSource(medium="")), "emptyDir scratch", SCRATCH),
    ],
)
def test_a_pod_that_would_lose_something_is_evicted_only_on_request(one: Pod, why: str, rules: Rules) -> None:
    assert why in drain([one], Rules()).blockers[0]
    assert drain([one], rules).blockers == ()


def noted(text: str) -> Node:
    return Node(metadata=ObjectMeta(name="a", annotations={names.MAINTENANCE: text}))


def test_a_record_is_read_back_as_it_was_written() -> None:
    assert record_of(Node(metadata=ObjectMeta(name="a"))) is None
    text = '{"by": "x", "since": "2026", "step": "apply", "cordoned": true, "allow": "rebind"}'
    assert record_of(noted(text)) == Record("x", "2026", "apply", True, "rebind")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not JSON"])
def test_a_record_that_cannot_be_read_is_reported(text: str) -> None:
    with pytest.raises(Failed, match="cannot be read"):
        record_of(noted(text))


def test_a_node_is_ready_again_when_all_conditions_are_true() -> None:
    there = node()
    assert there.status and there.status.conditions
    there.status.conditions.append(NodeCondition("True", names.UP_TO_DATE))
    assert unready(there, CHANGED) == []
    assert unready(node(taints=(names.TAINT,)), CHANGED)[-1] == f"it has the taint {names.TAINT}"
    there.status = NodeStatus(conditions=[NodeCondition("False", names.READY, reason="NoCarrier", message="rail0")])
    assert unready(there, CHANGED) == [
        "TrackbedReady is False (NoCarrier): rail0",
        "TrackbedUpToDate is not there",
        "Ready is not there",
    ]


def test_an_inventorys_hosts_are_found_by_their_nodes_names(tmp_path: Path) -> None:
    file = tmp_path / "fleet.py"
    file.write_text('print("[hello]"[1:])\nhosts = ["h1", ("h2", {"node_name": "10.0.0.2"})]\n')
    assert Inventory.read(file).hosts == {"h1": "h1", "10.0.0.2": "h2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('hosts = ["h1", ("h2", {"node_name": "h1"})]', "h1 and h2 have the same node_name"),
        (
            'hosts = [(name, {"node_name": "n", "kubernetes": {"server": f"https://{name}"}}) for name in ("h1", "h2")]',
            "h1 and h2 have the same node_name, n; .* in two clusters, choose one cluster's hosts with --limit GROUP",
        ),
        ("hosts = [", "is not an inventory that pyinfra can read: \\S*fleet.py:1: SyntaxError: '\\[' was never closed"),
        ("import nothing_of_this_name", "pyinfra can read: \\S*fleet.py:1: ModuleNotFoundError: No module named"),
    ],
)
def test_an_inventory_that_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "fleet.py"
    file.write_text(f"{text}\n")
    with pytest.raises(Failed, match=message):
        Inventory.read(file)


TWO_CLUSTERS = """
a = [("h1", {"node_name": "n1"}), ("h2", {"node_name": "n2"})]
b = [("h3", {"node_name": "n1"})]
"""


@pytest.mark.parametrize(
    ("limit", "hosts"),
    [
        (("a",), {"n1": "h1", "n2": "h2"}),
        (("b",), {"n1": "h3"}),
        (("b", "h2"), {"n1": "h3", "n2": "h2"}),
        (("h[12]",), {"n1": "h1", "n2": "h2"}),
        (("fleet", "h*"), "h1 and h3 have the same node_name, n1"),
        (("c",), "has no group and no host 'c'; its groups are a, b, fleet"),
        (("b", "n2"), "has no group and no host 'n2'"),
    ],
)
def test_the_hosts_of_one_cluster_are_chosen_as_for_pyinfra(
    tmp_path: Path, limit: tuple[str, ...], hosts: dict[str, str] | str
) -> None:
    file = tmp_path / "fleet.py"
    file.write_text(TWO_CLUSTERS)
    if isinstance(hosts, str):
        with pytest.raises(Failed, match=hosts):
            Inventory.read(file, limit)
    else:
        assert Inventory.read(file, limit).hosts == hosts


@pytest.mark.slow
def test_a_command_runs_on_a_nodes_host_with_each_word_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "fleet.py"
    file.write_text('hosts = [("@local", {"node_name": "a"})]\n')
    inventory = Inventory.read(file)
    ran = inventory.run("a", ["printf", "%s|", "two words", "$HOME", "it's"], 60)
    assert (ran.failed, ran.output) == (False, "two words|$HOME|it's|")
    assert inventory.run("a", ["sh", "-c", "echo why >&2; exit 3"], 60).failed
    assert inventory.run("a", ["sh", "-c", "echo why >&2; exit 3"], 60).output.startswith("why")
    assert "no answer" in inventory.run("a", ["sleep", "30"], 2.5).output


@contextmanager
def ssh_server(connected: list[str], name: str) -> Iterator[int]:
    """Its port. It ends each connection, and adds this name to ``connected``."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            connected.append(name)

    with TCPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        try:
            yield listening.server_address[1]
        finally:
            listening.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "text"),
    [("gpu1.py", "servers = [({0}), ({1})]"), ("fleet.py", "gpu1 = [({1})]\nservers = [({0})]")],
    ids=["file", "list"],
)
def test_a_command_runs_on_a_host_alone_that_has_the_name_of_a_group(tmp_path: Path, file: str, text: str) -> None:
    connected: list[str] = []
    with ssh_server(connected, "gpu1") as first, ssh_server(connected, "gpu2") as second:
        data = {"ssh_hostname": "127.0.0.1", "ssh_password": "p", "ssh_connect_retries": 0}
        hosts = [f"{name!r}, { {**data, 'ssh_port': port}!r}" for name, port in (("gpu1", first), ("gpu2", second))]
        (tmp_path / file).write_text(text.format(*hosts))
        assert Inventory.read(tmp_path / file).run("gpu1", ["true"], 60).failed
    assert set(connected) == {"gpu1"}
