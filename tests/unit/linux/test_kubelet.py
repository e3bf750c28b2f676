"""The kubelet's allocations, from a server of the library grpcio, encoded by the library protobuf."""

import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from agent.linux.grpc import call
from agent.linux.kubelet import PAUSE, LinuxKubelet
from tests.unit.linux.pod_resources import claimant, encoded, pod


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "kubelet.sock")


# A process of its own: gRPC's threads and this suite's forks do not go together.
SERVER = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import grpc

folder = Path(sys.argv[1])

def answer(request, context):
    return (folder / "answer").read_bytes()

def refuse(request, context):
    context.abort(grpc.StatusCode.INTERNAL, (folder / "answer").read_text())

def limit(request, context):
    left = folder / "left"
    if refusals := int(left.read_text()):
        left.write_text(str(refusals - 1))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
    return answer(request, context)

def hang(request, context):
    threading.Event().wait()

class Lister(grpc.GenericRpcHandler):
    def service(self, details):
        assert details.method == "/v1.PodResourcesLister/List"
        does = {"answer": answer, "refuse": refuse, "limit": limit, "hang": hang}.get((folder / "does").read_text())
        return grpc.unary_unary_rpc_method_handler(does) if does else None

server = grpc.server(ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((Lister(),))
server.add_insecure_port(f"unix:{folder / 'kubelet.sock'}")
server.start()
print("serving", flush=True)
server.wait_for_termination()
"""


@frozen
class Served:
    """A gRPC server whose requests and answers are plain bytes."""

    folder: Path

    @property
    def path(self) -> str:
        return str(self.folder / "kubelet.sock")

    def does(self, what: str, answer: bytes = b"") -> None:
        (self.folder / "answer").write_bytes(answer)
        (self.folder / "does").write_text(what)

    def allocations(self, *pods: dict[str, Any]) -> Mapping[str, tuple[str, ...]]:
        self.does("answer", encoded(*pods))
        return LinuxKubelet((self.path,), timeout=20).allocations()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    process = subprocess.Popen([sys.executable, "-c", SERVER, folder], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        yield Served(folder)
        process.kill()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


# With which an HTTP/2 server begins; and what needs no answer.
SETTINGS = frame(4, 0, 0, b"")
PING_ACKNOWLEDGED = frame(6, 1, 0, bytes(8))


@contextmanager
def saying(path: str, said: bytes, times: int = 1) -> Iterator[None]:
    """A server that says the same whatever it is asked, and hangs up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError):
                for _ in range(times):
                    connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            thread.join()


def refusal(path: str, timeout: float = 20) -> OSError:
    with pytest.raises(OSError, match=path) as caught:
        LinuxKubelet((path,), timeout).allocations()
    return caught.value


def test_every_pod_of_a_device_is_named_once(served: Served) -> None:
    pods = pod("a", "0000:3b:00.2", "0000:3b:00.3"), pod("b", "0000:3b:00.3", "0000:3b:00.3", namespace="other")
    assert served.allocations(*pods) == {"0000:3b:00.2": ("team/a",), "0000:3b:00.3": ("other/b", "team/a")}


@pytest.mark.parametrize(
    ("identifier", "device"),
    [
        ("0000:3B:00.2", "0000:3b:00.2"),
        ("erdma_0/17", "erdma_0"),
        pytest.param("rdmap79s0", "rdmap79s0", id="aws-efa-eks-22"),
        ("mlx5_core.sf.4", "mlx5_core.sf.4"),
        ("GPU-a4f34abc-7715-3560-dcea-7238b9611a45", "GPU-a4f34abc-7715-3560-dcea-7238b9611a45"),
        ("volume-2026-03-04-12", "volume-2026-03-04-12"),
        ("0123456789ab-cd-ef-1", "0123456789ab-cd-ef-1"),
    ],
)
def test_a_device_is_its_pci_address_or_else_what_the_plugin_calls_it(
    served: Served, identifier: str, device: str
) -> None:
    assert served.allocations(pod("a", identifier)) == {device: ("team/a",)}


@pytest.mark.parametrize(
    ("claimed", "devices"),
    [
        ({"device_name": "0000-3b-00-2"}, ["0000:3b:00.2"]),
        pytest.param({"device_name": "pci-0000-3b-00-2"}, ["0000:3b:00.2"], id="amazon-cloudwatch-agent-test-753"),
        ({"cdi_devices": [{"name": "d.io/vf=a4f34abc-7715-3560-dcea-7238b9611a45-0000-3b-00-2"}]}, ["0000:3b:00.2"]),
        ({"device_name": "gpu-0", "cdi_devices": [{"name": "nvidia.com/gpu=0"}]}, []),
    ],
)
def test_a_claimed_device_counts_where_its_name_has_a_pci_address(
    served: Served, claimed: dict[str, Any], devices: list[str]
) -> None:
    assert list(served.allocations(claimant("a", **claimed))) == devices


def test_a_device_has_the_cpus_of_all_containers_of_its_pod(served: Served) -> None:
    both = pod("a", "0000:3b:00.2")
    both["containers"][0]["cpu_ids"] = [0, 127]
    served.does("answer", encoded(both, claimant("b", device_name="0000-3b-00-3")))
    cpus = LinuxKubelet((served.path,), timeout=20).cpus()
    assert cpus == {"0000:3b:00.2": {0, 1, 127, 300, 2**40}, "0000:3b:00.3": frozenset()}


def test_a_device_has_the_cpus_that_the_containers_of_its_pod_share(served: Served) -> None:
    """With PodLevelResourceManagers, such a container lists none (pkg/kubelet/apis/podresources/server_v1.go)."""
    shared = claimant("a", device_name="0000-3b-00-2")
    shared |= {"cpu_ids": [2, 3, 300], "memory": [{"memory_type": "memory", "size": 2**50}]}
    exclusive = pod("b", "0000:3b:00.3") | {"cpu_ids": [1, 4, 300, 2**40]}
    served.does("answer", encoded(shared, exclusive))
    cpus = LinuxKubelet((served.path,), timeout=20).cpus()
    assert cpus == {"0000:3b:00.2": {2, 3, 300}, "0000:3b:00.3": {1, 4, 300, 2**40}}


def test_pods_without_devices_have_no_allocations(served: Served) -> None:
    assert served.allocations() == {}
    assert served.allocations(pod("a"), claimant("b")) == {}


def test_an_answer_beyond_http2_s_initial_window_is_read_whole(served: Served) -> None:
    pods = [pod(f"trainer-{number}", f"{number // 8:04x}:00:00.{number % 8}") for number in range(5000)]
    assert len(encoded(*pods)) > 5 * 65535
    assert len(served.allocations(*pods)) == 5000


def test_without_a_kubelet_nothing_is_allocated_also_if_one_has_left_its_socket(path: str) -> None:
    assert LinuxKubelet((path, f"{path}/nowhere")).allocations() == {}
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    assert LinuxKubelet((path,)).allocations() == {}


def test_the_kubelet_of_another_distribution_is_found(served: Served, path: str) -> None:
    served.does("answer", encoded(pod("a", "0000:3b:00.2")))
    assert LinuxKubelet((path, served.path), timeout=20).allocations() == {"0000:3b:00.2": ("team/a",)}


def test_a_kubelet_that_does_not_accept_the_connection_times_out(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        error = refusal(path, timeout=0.1)
    assert error.errno == errno.ETIMEDOUT
    assert "no answer within 0.1 s" in str(error)


NO_LIST = "the answer is not a list of pods"


@pytest.mark.parametrize(
    ("does", "answer", "number", "words"),
    [
        ("hang", b"", errno.ETIMEDOUT, []),
        ("nothing of the kind", b"", errno.ENOSYS, ["UNIMPLEMENTED", "older than Kubernetes 1.20"]),
        ("refuse", "100 % über dem Limit".encode(), errno.EREMOTEIO, ["INTERNAL: 100 % über dem Limit"]),
        ("answer", b"\xff", errno.EPROTO, [NO_LIST]),
        ("answer", b"\x0a\x7f", errno.EPROTO, [NO_LIST]),
        ("answer", b"\x0a\x03\x0a\x01\xff", errno.EPROTO, [NO_LIST]),
        ("answer", b"\x0b\x0c", errno.EPROTO, [NO_LIST]),
    ],
    ids=["silent", "without the API", "refuses", "no message", "cut short", "no text", "a group"],
)
def test_a_kubelet_that_gives_no_list_of_pods_is_an_error(
    served: Served, does: str, answer: bytes, number: int, words: list[str]
) -> None:
    served.does(does, answer)
    error = refusal(served.path, timeout=0.3 if does == "hang" else 20)
    assert error.errno == number
    assert all(word in str(error) for word in words)


def test_a_request_that_the_rate_limit_refuses_is_made_again(served: Served) -> None:
    served.does("limit", encoded(pod("a", "0000:3b:00.2")))
    (served.folder / "left").write_text("3")
    assert LinuxKubelet((served.path,), timeout=20).allocations() == {"0000:3b:00.2": ("team/a",)}


@pytest.mark.slow  # each answer must come within the timeout, also on a busy machine
def test_a_rate_limit_that_refuses_until_the_timeout_is_an_error(served: Served) -> None:
    served.does("limit")
    (served.folder / "left").write_text("1000000")
    error = refusal(served.path, timeout=10.0)
    assert error.errno == errno.EBUSY
    assert "RESOURCE_EXHAUSTED: " in str(error)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (b"", "closed before the answer's end"),
        (SETTINGS, "closed before the answer's end"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "closed before the answer's end"),
        (b"\0\0\0" + b"\0" * 6, "not HTTP/2"),
    ],
)
def test_a_server_that_speaks_another_protocol_is_an_error(path: str, said: bytes, complaint: str) -> None:
    with saying(path, said):
        error = refusal(path)
    assert error.errno == errno.EPROTO
    assert complaint in str(error)


def test_a_kubelet_that_sends_without_end_times_out(path: str) -> None:
    with saying(path, PING_ACKNOWLEDGED, times=1_000_000):
        assert refusal(path, timeout=0.2).errno == errno.ETIMEDOUT


def test_after_a_failure_the_kubelet_is_left_alone_for_a_while(served: Served) -> None:
    now = 100.0
    kubelet = LinuxKubelet((served.path,), timeout=20, clock=lambda: now)
    served.does("refuse", b"later")
    with pytest.raises(OSError, match="later"):
        kubelet.allocations()
    served.does("answer", encoded(pod("a", "0000:3b:00.2")))
    now += PAUSE - 1
    with pytest.raises(OSError, match="later"):
        kubelet.allocations()
    now += 1
    assert kubelet.allocations() == {"0000:3b:00.2": ("team/a",)}


FRAMES = st.builds(frame, st.integers(0, 10), st.integers(0, 255), st.integers(0, 2), st.binary(max_size=40))


@given(st.lists(FRAMES, max_size=4))
def test_frames_without_an_answer_are_an_error(frames: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(SETTINGS + b"".join(frames))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError):
            call(ours, "/v1.PodResourcesLister/List", 20)


def test_a_kubelet_was_started_when_its_socket_was_made(tmp_path: Path) -> None:
    first, second = tmp_path / "first.sock", tmp_path / "second.sock"
    kubelet = LinuxKubelet((str(first), str(second)))
    assert kubelet.started() == 0.0
    # A kubelet that gets another --root-dir leaves its socket below the one before.
    for path, made in ((second, 1000.0), (first, 2000.0), (second, 3000.0)):
        path.touch()
        os.utime(path, (made, made))
        assert kubelet.started() == made
