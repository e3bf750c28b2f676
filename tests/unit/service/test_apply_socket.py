"""The socket by which `trackbed apply` asks the running service, and the lock for the one writer."""

import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from agent.report.records import Change, Condition, Disruption, Outcome
from agent.service import lock
from agent.service.apply_socket import ApplyRefused, Progress, Requests, ask

OUTCOME = Outcome(Change("vfs", "0000:21:00.0", "count", 4, 5, Disruption.VF_RESET), "applied")
READY = Progress(True, (OUTCOME,), (Condition("Converged", "True", "AsWanted"),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "apply.sock"


@pytest.fixture
def requests(path: Path) -> Requests:
    return Requests(path)


@pytest.fixture
def client(path: Path, requests: Requests) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        yield connection


def test_what_a_client_allows_ends_when_it_disconnects(client: socket.socket, requests: Requests) -> None:
    assert requests.allowed() == (None, "")
    client.sendall(b'{"allow": "link-flap", "only": "rail0"}\n')
    assert requests.accept()
    assert requests.allowed() == (Disruption.LINK_FLAP, "rail0")
    requests.send(READY)
    assert json.loads(client.recv(1 << 16))["ready"] is True
    assert requests.allowed() == (Disruption.LINK_FLAP, "rail0")
    client.close()
    assert requests.allowed() == (None, "")
    requests.send(READY)


@pytest.mark.parametrize(
    "request_line",
    [
        b"{}",
        b"\xff",
        b"[]",
        b"5",
        b"[" * 4096,
        *(b'{"allow": %s}' % each for each in (b'"x"', b"3", b"NaN", b'"\\ud800"')),
    ],
)
def test_a_malformed_request_is_refused_and_allows_nothing(
    client: socket.socket, requests: Requests, request_line: bytes
) -> None:
    client.sendall(request_line + b"\n")
    assert not requests.accept()
    assert "not understood" in json.loads(client.recv(4096))["refused"]
    assert requests.allowed() == (None, "")


def test_a_second_client_is_told_to_wait(client: socket.socket, requests: Requests, path: Path) -> None:
    client.sendall(b'{"allow": null}\n')
    assert requests.accept()
    with socket.socket(socket.AF_UNIX) as second:
        second.connect(str(path))
        second.sendall(b'{"allow": "reboot"}\n')
        assert not requests.accept()
        assert "another `trackbed apply`" in json.loads(second.recv(4096))["refused"]
    assert requests.allowed() == (None, "")
    assert requests.has_client()


def test_only_root_may_connect_and_a_socket_left_behind_is_replaced(path: Path) -> None:
    Requests(path)
    Requests(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's buffers may be larger than net.core.wmem_max")
def test_a_client_is_sent_the_outcomes_of_a_thousand_new_vfs(client: socket.socket, requests: Requests) -> None:
    client.sendall(b'{"allow": null}\n')
    assert requests.accept()
    requests.send(evolve(READY, outcomes=(OUTCOME,) * 15_000))
    with client.makefile("rb") as lines:
        assert len(json.loads(lines.readline())["outcomes"]) == 15_000
    assert requests.has_client()


def test_a_client_is_told_why_it_has_no_answer(tmp_path: Path, path: Path, requests: Requests) -> None:
    with pytest.raises(ApplyRefused, match="No such file"):
        list(ask(tmp_path / "absent", None, 1.0))
    assert list(ask(path, None, 0.05)) == []


# --- the lock --------------------------------------------------------------------------------------------------


def test_there_is_one_writer(tmp_path: Path) -> None:
    assert not lock.held(tmp_path)
    descriptor = lock.take(tmp_path)
    assert lock.held(tmp_path)
    with pytest.raises(lock.Held):
        lock.take(tmp_path)
    os.close(descriptor)
    assert not lock.held(tmp_path)
    os.close(lock.take(tmp_path))
