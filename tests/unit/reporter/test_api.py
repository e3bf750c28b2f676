"""The reporter's client of the API server, over real connections."""

import queue
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest

from agent.reporter.kubernetes import api as api_module
from agent.reporter.kubernetes.api import Abandoned, Api, Refused, Session, Unreachable, explain, read_document, trust
from agent.reporter.kubernetes.backoff import LAST_WAIT
from agent.reporter.kubernetes.node import read_node
from agent.reporter.kubernetes.node_watch import NodeWatch
from tests.private_namespace import in_namespace
from tests.unit.reporter.scripted import (
    ENDINGS,
    Answer,
    answer_one,
    api_server,
    certificates,
    check_strictly,
    dripping_server,
    ending_server,
)

T = TypeVar("T")

# Ends the watch's thread, below.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def lists(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    return 200, {"kind": "List"}


def client(url: str, authority: Path) -> Api:
    session = Session(trust(authority))
    return Api(url, lambda: session)


def test_an_authority_without_identifiers_of_keys_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_strictly(monkeypatch)
    with api_server(tmp_path, lists) as server:
        assert client(*server).ask("GET", "/api/v1/nodes") == {"kind": "List"}


def test_a_new_connection_resumes_the_session_of_the_one_before(tmp_path: Path) -> None:
    with api_server(tmp_path, lists) as server:
        api = client(*server)
        for _ in range(3):
            api.ask("GET", "/api/v1/nodes")
            api.close()
        assert api.session().tls.session_stats()["hits"] == 2


@contextmanager
def followed(folder: Path, answer: Answer, look: Callable[[NodeWatch], T]) -> Iterator[Callable[[], T]]:
    """Watch the Node `a`. The result waits for the next change, and returns what `look` sees then."""
    seen: queue.Queue[T] = queue.Queue()
    over = threading.Event()
    with api_server(folder, answer) as (url, authority):
        known = Session(trust(authority))

        def session() -> Session:
            if over.is_set():
                raise SystemExit  # the watch's thread ends by that
            return known

        watch = NodeWatch(Api(url, session), "a", lambda: seen.put(look(watch)))
        threading.Thread(target=watch.follow, name="watch a", daemon=True).start()
        yield lambda: seen.get(timeout=10)
        over.set()
        watch.relist()
        for thread in threading.enumerate():
            if thread.name == "watch a":
                thread.join(10)


def test_a_malformed_node_is_reported_and_read_again(tmp_path: Path) -> None:
    node = {"metadata": {"name": "a", "uid": "u1", "resourceVersion": "7"}}
    lists = iter([[{}], [node]])

    def answer(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        return 200, {"metadata": {"resourceVersion": "7"}, "items": next(lists, [node])}

    with followed(tmp_path, answer, lambda watch: (watch.known, watch.trouble)) as change:
        known, trouble = change()
        assert not known and "cannot be read: KeyError('metadata')" in trouble
        assert change() == (True, "")
        # What it gets for a watch is no event.
        assert "cannot be read: KeyError('type')" in change()[1]


def test_a_node_with_a_lower_version_after_an_etcd_restore_is_accepted(tmp_path: Path) -> None:
    versions = iter(["900", "900", "7"])

    def answer(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        version = {"resourceVersion": next(versions, "7")}
        return 200, {"metadata": version, "items": [{"metadata": {"name": "a", "uid": "u1", **version}}]}

    with followed(tmp_path, answer, lambda watch: watch.node.version if watch.node else "") as change:
        # Of the list, of the watch that is none, and of the next list.
        assert [change() for _ in range(3)] == ["900", "900", "7"]


@pytest.mark.parametrize("drips", ["handshake", "headers", "body"])
def test_a_server_that_sends_a_byte_now_and_then_does_not_hold_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drips: str
) -> None:
    monkeypatch.setattr("agent.reporter.kubernetes.api.TIMEOUT", 0.5)
    with dripping_server(tmp_path, drips) as server:
        with pytest.raises((TimeoutError, Unreachable)) as raised:
            client(*server).ask("GET", "/")
        assert explain(raised.value) == "the API server does not answer in time"


def test_name_servers_that_do_not_answer_do_not_hold_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.reporter.kubernetes.api.TIMEOUT", 3.0)
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(60))
    authority, _ = certificates(tmp_path)
    with pytest.raises(Unreachable, match="no name server answers for api"):
        client("https://api.example.net", authority).ask("GET", "/")
    over.set()


@pytest.mark.parametrize("method", ["GET", "PATCH", "POST"])
@pytest.mark.parametrize("ends", ENDINGS)
def test_a_request_on_a_connection_that_has_ended_is_tried_again(tmp_path: Path, ends: str, method: str) -> None:
    idle, ended = threading.Event(), threading.Event()

    def end(connection: ssl.SSLSocket) -> None:
        assert idle.wait(10)
        ENDINGS[ends](connection)
        ended.set()

    with ending_server(tmp_path, end) as (url, authority, connections):
        api = client(url, authority)
        api.ask("GET", "/api/v1/nodes")
        idle.set()
        assert ends.startswith("no answer") or ended.wait(10)
        assert api.ask(method, "/api/v1/nodes") == {"kind": "List"}
        api.close()
    assert len(connections) == 2


@in_namespace("ip link set lo up")
def test_a_path_that_has_vanished_is_noticed_long_before_the_end_of_the_request(tmp_path: Path) -> None:
    api_module.TIMEOUT = 30.0
    with api_server(tmp_path, lists) as server:
        api = client(*server)
        api.ask("GET", "/")
        # Packets to it are lost from now on, and nobody says so.
        subprocess.run(["ip", "address", "del", "127.0.0.1/8", "dev", "lo"], check=True)
        with pytest.raises(Unreachable):
            api.ask("GET", "/")


def test_a_connection_that_is_idle_is_not_ended_by_what_a_more_urgent_request_needs(tmp_path: Path) -> None:
    def go_on(connection: ssl.SSLSocket) -> None:
        while answer_one(connection):
            pass

    with ending_server(tmp_path, go_on) as (url, authority, connections):
        api = client(url, authority)
        api.ask("GET", "/")
        api.abandon()
        with pytest.raises(Abandoned):
            api.ask("GET", "/")
        api.resume()
        api.ask("GET", "/")
        api.close()
    assert len(connections) == 1


@contextmanager
def silent_address(port: int) -> Iterator[str]:
    """An address that answers no more connections, as a server without power: the kernel drops those beyond the queue."""
    listens = ("127.0.0.2", port)
    with socket.create_server(listens, backlog=0), socket.create_connection(listens):
        yield listens[0]


@pytest.mark.slow  # what is left for the second address must be enough on a busy machine
def test_an_api_server_that_is_silent_leaves_time_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.reporter.kubernetes.api.TIMEOUT", 20.0)
    with api_server(tmp_path, lists) as (url, authority):
        port = urlsplit(url).port or 0
        with silent_address(port) as silent:
            stream = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            # One name with the addresses of two API servers, as in the DNS or in /etc/hosts.
            monkeypatch.setattr(
                socket, "getaddrinfo", lambda *_, **__: [(*stream, (each, port)) for each in (silent, "127.0.0.1")]
            )
            assert client(url, authority).ask("GET", "/api/v1/nodes") == {"kind": "List"}


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"[]", b'{"a": 1, "a": 2}'])
def test_an_answer_that_is_not_an_object_is_an_error_with_its_text(text: bytes) -> None:
    with pytest.raises(Refused, match="something that is not a JSON object"):
        read_document(text)


@pytest.mark.parametrize(
    ("given", "waits"), [("7", 7.0), ("9" * 400, LAST_WAIT), ("\u00b2", 0.0), ("-1", 0.0), ("soon", 0.0)]
)
def test_a_large_retry_after_does_not_silence_the_reporter(tmp_path: Path, given: str, waits: float) -> None:
    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        return 429, {"message": "later"}

    with api_server(tmp_path, answer, {"Retry-After": given}) as server, pytest.raises(Refused) as refused:
        client(*server).ask("GET", "/")
    assert refused.value.retry_after == waits


NODE = {"metadata": {"uid": "u", "resourceVersion": "1"}}


@pytest.mark.parametrize(
    "more",
    [
        {"status": {"allocatable": {"a.com/vf": 4}}},
        {"status": {"conditions": [{"type": "TrackbedReady", "status": True}]}},
        {"status": {"nodeInfo": {"bootID": None}}},
        {"spec": {"taints": ["a"]}},
        {"metadata": {"uid": "u", "resourceVersion": "1", "labels": {"a": None}}},
        {"metadata": {"uid": "u", "resourceVersion": 1}},
    ],
)
def test_a_node_with_wrong_types_is_refused_when_it_is_read(more: dict[str, Any]) -> None:
    # NodeWatch catches these, and tries again. Later, nobody would: the reporter would end.
    with pytest.raises((KeyError, TypeError, AttributeError)):
        read_node({**NODE, **more})


def test_a_condition_whose_times_were_never_set_is_read() -> None:
    never = {"type": "TrackbedReady", "status": "Unknown", "lastHeartbeatTime": None, "lastTransitionTime": None}
    assert read_node({**NODE, "status": {"conditions": [never]}}).conditions == {
        "TrackbedReady": {"type": "TrackbedReady", "status": "Unknown"}
    }
