"""The reporter's client of the API server, over real connections."""

import queue
import ssl
from pathlib import Path
from typing import Any

import pytest

from agent.reporter.api import Api, Session, trust
from agent.reporter.mirror import Mirror
from tests.unit.scripted import api_server


def test_an_authority_without_identifiers_of_keys_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = ssl.create_default_context

    def as_python_3_13_has_it(**options: Any) -> ssl.SSLContext:
        context = default(**options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_python_3_13_has_it)
    with api_server(tmp_path, lambda method, path, body: (200, {"kind": "List"})) as (url, authority):
        session = Session(trust(authority))
        assert Api(url, lambda: session).ask("GET", "/api/v1/nodes") == {"kind": "List"}


def test_what_is_no_node_is_said_and_asked_for_again(tmp_path: Path) -> None:
    node = {"metadata": {"name": "a", "uid": "u1", "resourceVersion": "7"}}
    lists = iter([[{}], [node]])

    def answer(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        return 200, {"metadata": {"resourceVersion": "7"}, "items": next(lists, [node])}

    heard: queue.Queue[tuple[bool, str]] = queue.Queue()
    with api_server(tmp_path, answer) as (url, authority):
        session = Session(trust(authority))
        mirror = Mirror(Api(url, lambda: session), "a", lambda: heard.put((mirror.known, mirror.trouble)))
        mirror.start()
        known, trouble = heard.get(timeout=10)
        assert not known and "is not understood: KeyError('metadata')" in trouble
        assert heard.get(timeout=10) == (True, "")
        # What it gets for a watch is no event.
        assert "is not understood: KeyError('type')" in heard.get(timeout=10)[1]


def test_a_node_of_an_etcd_that_was_restored_is_believed(tmp_path: Path) -> None:
    versions = iter(["900", "900", "7"])

    def answer(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        version = {"resourceVersion": next(versions, "7")}
        return 200, {"metadata": version, "items": [{"metadata": {"name": "a", "uid": "u1", **version}}]}

    seen: queue.Queue[str] = queue.Queue()
    with api_server(tmp_path, answer) as (url, authority):
        session = Session(trust(authority))
        mirror = Mirror(Api(url, lambda: session), "a", lambda: seen.put(mirror.node.version if mirror.node else ""))
        mirror.start()
        # Of the list, of the watch that is none, and of the next list.
        assert [seen.get(timeout=10) for _ in range(3)] == ["900", "900", "7"]
