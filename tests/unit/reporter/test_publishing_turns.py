"""What one turn of the reporter writes and says, and when the next one is due; its run until it ends."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.report import published
from agent.report.names import NOT_READY as NOTICE
from agent.report.records import Report, report_to_json
from agent.report.verdict import STALE
from agent.reporter.kubernetes.api import Api
from agent.reporter.kubernetes.backoff import LAST_WAIT
from agent.reporter.kubernetes.identity import TOKENS
from agent.reporter.kubernetes.node import read_node
from agent.reporter.kubernetes.publish import Publication
from agent.reporter.kubernetes.steps import LONGEST_SLEEP
from agent.runtime import boot_id, uptime
from tests.contract.asking import soon
from tests.unit.reporter.publication import UNREADY, Cluster, Credentials, Running, later, publishing, say, turn
from tests.unit.reporter.test_node import NO_CARRIER, REPORT, document, node


def test_the_error_names_a_missing_node_until_the_cluster_has_it(running: Running) -> None:
    reporter, cluster, _ = running
    say(reporter, REPORT)
    reporter.watch.node = None
    assert reporter.turn() == LONGEST_SLEEP
    assert (reporter.acknowledged.now.error, cluster.writes) == (
        "the cluster has no Node n1 yet, or node_name is wrong",
        [],
    )
    reporter.watch.node = node()
    reporter.turn()
    assert (reporter.acknowledged.now.error, cluster.writes) == ("", ["lease", "status", "n1"])
    assert (reporter.acknowledged.now.ready, reporter.acknowledged.now.boot_id) == (True, boot_id())


def test_nothing_is_written_before_the_node_was_read(running: Running) -> None:
    reporter, cluster, _ = running
    say(reporter, REPORT)
    reporter.watch.known, reporter.watch.trouble = False, "the API server does not answer in time"
    reporter.turn()
    assert (reporter.acknowledged.now.error, cluster.writes) == ("the API server does not answer in time", [])


def test_an_error_of_several_steps_is_reported_once(running: Running) -> None:
    reporter, cluster, _ = running
    say(reporter, UNREADY)
    cluster.busy = True
    reporter.watch.trouble = "it waits"
    reporter.turn()
    said = reporter.acknowledged.now.error.split("; ")
    assert (len(said), said[-1]) == (2, "it waits")


def test_what_is_published_says_whether_the_credentials_are_refused(running: Running) -> None:
    reporter, cluster, clocks = running
    say(reporter, REPORT)
    for status, refused in ((401, True), (403, False), (401, True), (None, False)):
        cluster.refusing = {} if status is None else dict.fromkeys(("lease", "status", "n1"), status)
        later(reporter, clocks, LAST_WAIT)
        latest = published.read(reporter.acknowledged.file)
        assert latest is not None and latest.refused is refused, (status, latest)


def test_credentials_are_renewed_when_they_are_due(running: Running) -> None:
    reporter, _, clocks = running
    kept: list[float] = []

    def renewed(now: float, api: Api) -> float:
        kept.append(now)
        return 20.0

    reporter.identity = Credentials(reporter.identity.session, renewed)
    assert (turn(reporter, REPORT), kept) == (20.0, [clocks.day])
    assert (later(reporter, clocks, 19.0), len(kept)) == (1.0, 1)
    assert later(reporter, clocks, 1.0) == 20.0
    assert kept[1:] == [clocks.day]


def without_a_taint(running: Running) -> None:
    """The Node has none."""
    reporter, cluster, _ = running
    cluster.node = document(spec={})
    reporter.watch.node = read_node(cluster.node)


def test_credentials_that_cannot_be_renewed_are_reported_and_still_used(running: Running) -> None:
    def expired(now: float, api: Api) -> float:
        raise OSError("no route to the authority")

    reporter, cluster, _ = running
    reporter.identity = Credentials(reporter.identity.session, expired)
    turn(reporter, REPORT)
    assert reporter.acknowledged.now.error.endswith("no route to the authority")
    assert cluster.writes == ["lease", "status", "n1"]


@pytest.mark.parametrize("what", ["n1", "status", "lease"])
@pytest.mark.parametrize("status", [400, 403, 404, 409, 422, 500])
def test_the_node_is_read_again_if_a_refusal_shows_a_change(running: Running, what: str, status: int) -> None:
    without_a_taint(running)
    reporter, cluster, _ = running
    cluster.refusing[what] = status
    turn(reporter, UNREADY)
    gone = what == "lease" and status == 404  # then another one is made
    assert gone or f"answers {status}" in reporter.acknowledged.now.error
    assert reporter.watch.known is not (what != "lease" and status in (404, 409, 422))


def test_while_the_node_cannot_say_that_it_is_not_ready_its_lease_does(running: Running) -> None:
    reporter, cluster, clocks = running
    cluster.refusing["status"] = 403

    def notice() -> Any:
        for _ in range(2):
            later(reporter, clocks, LAST_WAIT)
        return (cluster.lease or {})["metadata"]["annotations"].get(NOTICE)

    say(reporter, REPORT)
    assert notice() is None
    assert reporter.acknowledged.now.error
    say(reporter, UNREADY)
    said = notice() or ""
    assert said.startswith("NoCarrier: ") and said.endswith(NO_CARRIER.message)
    assert not reporter.acknowledged.now.ready and reporter.acknowledged.now.generation == 0
    reporter.files.report.unlink()
    assert str(notice()).startswith("NoReport: ")
    cluster.refusing.clear()
    say(reporter, UNREADY)
    assert notice() is None


def test_a_notice_whose_writing_was_not_confirmed_is_removed_once_the_node_is_ready(running: Running) -> None:
    """A sweep would withdraw Ready by it. The API server, or a proxy before it, may have carried out what it answers 504 to."""
    reporter, cluster, clocks = running
    turn(reporter, REPORT)
    cluster.refusing["status"], cluster.unconfirmed = 403, 504
    say(reporter, UNREADY)
    for _ in range(2):
        later(reporter, clocks, LAST_WAIT)
    assert cluster.lease and NOTICE in cluster.lease["metadata"]["annotations"]
    cluster.refusing.clear()
    cluster.unconfirmed = 0
    say(reporter, REPORT)
    later(reporter, clocks, LAST_WAIT)
    assert NOTICE not in cluster.lease["metadata"]["annotations"]


def test_a_lease_is_not_renewed_without_a_fresh_report(running: Running) -> None:
    reporter, cluster, _ = running
    reporter.turn()
    assert cluster.writes == ["status"]
    stale = evolve(REPORT, boot_id=boot_id(), uptime=uptime() - STALE - 1)
    reporter.files.report.write_text(report_to_json(stale))
    assert reporter.turn() == LONGEST_SLEEP
    assert "lease" not in cluster.writes


@pytest.mark.parametrize("report", [REPORT, UNREADY])
def test_the_next_turn_is_just_after_the_heartbeat_would_be_stale(running: Running, report: Report) -> None:
    reporter, _, _ = running
    began = uptime()
    turn(reporter, report)  # the conditions are written
    due = reporter.turn()
    assert STALE + 1.0 - (uptime() - began) <= due <= STALE + 1.0


def test_labels_of_a_node_that_cannot_be_read_leave_it_tainted(running: Running) -> None:
    reporter, cluster, clocks = running
    reporter.files.labels.write_text("nonsense")
    turn(reporter, REPORT)
    assert cluster.writes == ["lease"]
    assert "the deploy writes it" in reporter.acknowledged.now.error
    reporter.watch.node = node(spec={})
    for report in (UNREADY, REPORT):  # only a node that is ready gets its labels
        reporter.files.labels.write_text("nonsense")
        turn(reporter, UNREADY)
        assert cluster.writes[:3] == ["lease", "n1", "status"]
        assert "the deploy writes it" in reporter.acknowledged.now.error
        reporter.files.labels.write_text('{"labels": [{"key": "example.net/rail", "value": "8"}]}')
        say(reporter, report)
        later(reporter, clocks, LAST_WAIT)
        assert reporter.acknowledged.now.error == ""
    patch = next(each for each in reversed(cluster.patches) if isinstance(each, list))
    said = {operation["path"]: operation.get("value") for operation in patch}
    assert said.get("/metadata/labels/example.net~1rail") == "8", cluster.patches


def test_a_change_wakes_the_reporter_and_a_heartbeat_does_not(running: Running) -> None:
    reporter, _, _ = running
    turn(reporter, REPORT)
    say(reporter, evolve(REPORT, heartbeat=1.0))
    reporter.report_written()
    assert not reporter._changed.is_set()
    say(reporter, evolve(REPORT, generation=1))
    reporter.report_written()
    assert reporter._changed.is_set()


@contextmanager
def publishing_itself(reporter: Publication) -> Iterator[None]:
    """Have the reporter publish in a thread, which ends in the end."""

    def end() -> float:
        raise SystemExit

    def publish() -> None:
        with suppress(SystemExit):
            reporter.run()

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    threading.Thread(target=reporter.watch.follow, daemon=True).start()
    yield
    reporter.clock = end
    reporter.wake()
    thread.join(60.0)
    assert not thread.is_alive()


def test_systemd_hears_that_the_publishing_thread_lives_until_it_hangs(
    running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("agent.reporter.kubernetes.api.TIMEOUT", 600.0)
    monkeypatch.setattr("agent.reporter.kubernetes.publish.LOOK_EVERY", 0.02)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    reporter, cluster, _ = running
    say(reporter, REPORT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified, publishing_itself(reporter):
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(60.0)
        assert [notified.recv(100) for _ in range(5)] == [b"WATCHDOG=1"] * 5
        cluster.hanging = "status"
        say(reporter, UNREADY)
        assert cluster.hung.wait(60.0)
        notified.settimeout(0.5)
        with pytest.raises(TimeoutError):
            while True:
                notified.recv(100)
        cluster.over.set()
        notified.settimeout(60.0)
        assert notified.recv(100) == b"WATCHDOG=1"


def test_systemd_hears_before_each_request_that_the_publishing_thread_lives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each may take ten seconds, and the taint may need four of them."""
    answer, heard = Cluster.answer, list[int]()
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.setblocking(False)

        def answered(cluster: Cluster, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]] | None:
            heard.append(0)
            with suppress(BlockingIOError):
                while notified.recv(100):
                    heard[-1] += 1
            return answer(cluster, method, path, body)

        monkeypatch.setattr(Cluster, "answer", answered)
        with publishing(tmp_path) as running:
            without_a_taint(running)
            reporter, cluster, _ = running
            cluster.conflicts = ["n1"]
            turn(reporter, UNREADY)
    assert len(heard) > 2
    assert all(heard), heard


@pytest.mark.parametrize("hanging", ["lease", "status", "token"])
def test_a_write_that_hangs_does_not_delay_the_message_that_the_node_is_not_ready(
    running: Running, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    def due(now: float, api: Api) -> float:
        api.ask("POST", TOKENS, body={})
        return float("inf")

    monkeypatch.setattr("agent.reporter.kubernetes.api.TIMEOUT", 600.0)
    without_a_taint(running)
    reporter, cluster, _ = running
    cluster.hanging = hanging
    if hanging == "token":
        reporter.identity = Credentials(reporter.identity.session, due)
    say(reporter, REPORT)
    with publishing_itself(reporter):
        assert cluster.hung.wait(60.0)
        cluster.writes.clear()
        say(reporter, UNREADY)
        reporter.report_written()
        soon(lambda: "n1" in cluster.writes or None, "taint", within=30.0)
        assert next(write for write in cluster.writes if write != "lease") == "n1"
        cluster.over.set()


@pytest.mark.parametrize(
    ("report", "writes"), [(REPORT, ["identity", "lease", "status"]), (UNREADY, ["n1", "status", "lease", "identity"])]
)
def test_that_a_node_is_not_ready_is_written_before_its_identity_is_renewed(
    running: Running, report: Report, writes: list[str]
) -> None:
    def noted(now: float, api: Api) -> float:
        cluster.writes.append("identity")
        return float("inf")

    without_a_taint(running)
    reporter, cluster, _ = running
    reporter.identity = Credentials(reporter.identity.session, noted)
    turn(reporter, report)
    assert cluster.writes[: len(writes)] == writes


def test_the_reporter_publishes_until_it_ends(running: Running) -> None:
    reporter, cluster, _ = running
    reporter.watch.known = False
    say(reporter, REPORT)
    with publishing_itself(reporter):
        soon(lambda: reporter.acknowledged.now.ready or None, "Ready", within=60.0)
        # If the watch lists the Nodes again meanwhile, it gets the Node as it was, and the Node is written again.
        assert cluster.writes[:3] == ["lease", "status", "n1"]
        say(reporter, evolve(UNREADY, generation=1))
        reporter.report_written()
        soon(lambda: reporter.acknowledged.now.generation == 1 or None, "NotReady", within=60.0)
        assert not reporter.acknowledged.now.ready
