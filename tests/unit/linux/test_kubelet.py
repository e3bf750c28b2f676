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
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, wrappers_pb2
from hypothesis import given
from hypothesis import strategies as st

from agent.linux import grpc as our_grpc
from agent.linux.grpc import call
from agent.linux.kubelet import PAUSE, LinuxKubelet

# k8s.io/kubelet/pkg/apis/podresources/v1/api.proto, as far as it says which device a pod has; `*` is "repeated".
API = {
    "ListPodResourcesResponse": {1: "*PodResources pod_resources"},
    "PodResources": {1: "string name", 2: "string namespace", 3: "*ContainerResources containers"},
    "ContainerResources": {
        1: "string name",
        2: "*ContainerDevices devices",
        3: "*int64 cpu_ids",
        4: "*ContainerMemory memory",
        5: "*DynamicResource dynamic_resources",
    },
    "ContainerMemory": {1: "string memory_type", 2: "uint64 size"},
    "ContainerDevices": {1: "string resource_name", 2: "*string device_ids"},
    "DynamicResource": {2: "string claim_name", 3: "string claim_namespace", 4: "*ClaimResource claim_resources"},
    "ClaimResource": {
        1: "*CDIDevice cdi_devices",
        2: "string driver_name",
        3: "string pool_name",
        4: "string device_name",
    },
    "CDIDevice": {1: "string name"},
}


def _response_class() -> Any:
    field_types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="api.proto", package="v1", syntax="proto3")
    for name, fields in API.items():
        message = file.message_type.add(name=name)
        for number, declared in fields.items():
            kind, field_name = declared.lstrip("*").split()
            field = message.field.add(name=field_name, number=number, label=3 if declared.startswith("*") else 1)
            if kind in API:
                field.type, field.type_name = field_types.TYPE_MESSAGE, f".v1.{kind}"
            else:
                field.type = getattr(field_types, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("v1.ListPodResourcesResponse"))


Response = _response_class()


def encoded(*pods: dict[str, Any]) -> bytes:
    message: bytes = json_format.ParseDict({"pod_resources": pods}, Response()).SerializeToString()
    return message


def pod(name: str, *ids: str, namespace: str = "team") -> dict[str, Any]:
    """A pod with devices from a device plugin, and with all other fields that the kubelet gives for a container."""
    container = {
        "name": "main",
        "devices": [{"resource_name": "example.com/vf", "device_ids": list(ids)}],
        "cpu_ids": [1, 300, 2**40],
        "memory": [{"memory_type": "hugepages-2Mi", "size": 2**50}],
    }
    return {"name": name, "namespace": namespace, "containers": [{"name": "idle"}, container]}


def claimant(name: str, **claimed: Any) -> dict[str, Any]:
    """A pod with a device from dynamic resource allocation."""
    claim = {"claim_name": "nic", "claim_namespace": "team", "claim_resources": [{"driver_name": "d", **claimed}]}
    return {"name": name, "namespace": "team", "containers": [{"name": "main", "dynamic_resources": [claim]}]}


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
        return LinuxKubelet((self.path,)).allocations()


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
        ({"device_name": "pci-0000-3b-00-2"}, ["0000:3b:00.2"]),
        ({"cdi_devices": [{"name": "d.io/vf=a4f34abc-7715-3560-dcea-7238b9611a45-0000-3b-00-2"}]}, ["0000:3b:00.2"]),
        ({"device_name": "gpu-0", "cdi_devices": [{"name": "nvidia.com/gpu=0"}]}, []),
    ],
)
def test_a_claimed_device_counts_where_its_name_has_a_pci_address(
    served: Served, claimed: dict[str, Any], devices: list[str]
) -> None:
    assert list(served.allocations(claimant("a", **claimed))) == devices


def test_pods_without_devices_have_no_allocations(served: Served) -> None:
    assert served.allocations() == {}
    assert served.allocations(pod("a"), claimant("b")) == {}


def test_an_answer_beyond_http2_s_initial_window_is_read_whole(served: Served) -> None:
    pods = [pod(f"trainer-{number}", f"{number // 8:04x}:00:00.{number % 8}") for number in range(5000)]
    assert len(encoded(*pods)) > 5 * 65535
    assert len(served.allocations(*pods)) == 5000


def test_no_kubelet_has_allocated_nothing(path: str) -> None:
    assert LinuxKubelet((path, f"{path}/nowhere")).allocations() == {}


def test_the_socket_that_a_kubelet_left_behind_is_no_kubelet(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    assert LinuxKubelet((path,)).allocations() == {}


def test_the_kubelet_of_another_distribution_is_found(served: Served, path: str) -> None:
    served.does("answer", encoded(pod("a", "0000:3b:00.2")))
    assert LinuxKubelet((path, served.path)).allocations() == {"0000:3b:00.2": ("team/a",)}


def test_a_kubelet_that_does_not_accept_the_connection_times_out(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        error = refusal(path, timeout=0.1)
    assert error.errno == errno.ETIMEDOUT
    assert "no answer within 0.1 s; see the kubelet's log" in str(error)


def test_a_kubelet_that_accepts_and_does_not_answer_times_out(served: Served) -> None:
    served.does("hang")
    assert refusal(served.path, timeout=0.3).errno == errno.ETIMEDOUT


def test_the_error_of_a_kubelet_without_the_api_names_the_version_that_has_it(served: Served) -> None:
    served.does("nothing of the kind")
    error = refusal(served.path)
    assert error.errno == errno.ENOSYS
    assert "UNIMPLEMENTED" in str(error)
    assert "older than Kubernetes 1.20" in str(error)


def test_a_request_that_the_rate_limit_refuses_is_made_again(served: Served) -> None:
    served.does("limit", encoded(pod("a", "0000:3b:00.2")))
    (served.folder / "left").write_text("3")
    assert LinuxKubelet((served.path,), timeout=20).allocations() == {"0000:3b:00.2": ("team/a",)}


def test_a_rate_limit_that_refuses_until_the_timeout_is_an_error(served: Served) -> None:
    served.does("limit")
    (served.folder / "left").write_text("1000000")
    error = refusal(served.path, timeout=0.1)
    assert error.errno == errno.EBUSY
    assert "RESOURCE_EXHAUSTED: rejected by rate limit" in str(error)


def test_a_kubelet_that_refuses_is_quoted(served: Served) -> None:
    served.does("refuse", "100 % über dem Limit".encode())
    error = refusal(served.path)
    assert error.errno == errno.EREMOTEIO
    assert "INTERNAL: 100 % über dem Limit" in str(error)


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x7f", b"\x0a\x03\x0a\x01\xff", b"\x0b\x0c"])
def test_an_answer_that_is_no_list_of_pods_is_an_error(served: Served, message: bytes) -> None:
    served.does("answer", message)
    error = refusal(served.path)
    assert error.errno == errno.EPROTO
    assert "the answer is not a list of pods" in str(error)


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
    kubelet = LinuxKubelet((served.path,), clock=lambda: now)
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


@given(
    st.lists(
        st.tuples(st.text(max_size=200), st.lists(st.text(), max_size=3), st.integers(0, 2**64 - 1)),
        max_size=3,
    )
)
def test_strings_are_read_as_protobuf_wrote_them(pods: list[tuple[str, list[str], int]]) -> None:
    memory = [{"memory": [{"size": size}]} for _, _, size in pods]
    described = [
        {"name": name, "containers": [{"devices": [{"device_ids": ids}]}, extra]}
        for (name, ids, _), extra in zip(pods, memory, strict=True)
    ]
    wanted = [field for name, ids, _ in pods for field in [("name", name)] * bool(name) + [("id", i) for i in ids]]
    schema: our_grpc.Schema = {1: {1: "name", 3: {2: {2: "id"}}}}
    assert list(our_grpc.strings(encoded(*described), schema)) == wanted


@pytest.mark.parametrize("number", [wrappers_pb2.FloatValue(value=-1.1), wrappers_pb2.DoubleValue(value=-1.1)])
def test_numbers_of_a_fixed_length_are_skipped(number: Any) -> None:
    message = number.SerializeToString() + wrappers_pb2.StringValue(value="x").SerializeToString()
    assert list(our_grpc.strings(message, {1: "text"})) == [("text", "x")]


@given(st.binary())
def test_arbitrary_bytes_are_a_message_or_an_error(message: bytes) -> None:
    try:
        fields = list(our_grpc.strings(message, {1: {1: "name"}, 2: "text"}))
    except ValueError:
        return
    assert sum(len(text.encode()) for _, text in fields) < len(message) or not message


def test_a_kubelet_was_started_when_its_socket_was_made(tmp_path: Path) -> None:
    first, second = tmp_path / "first.sock", tmp_path / "second.sock"
    kubelet = LinuxKubelet((str(first), str(second)))
    assert kubelet.started() == 0.0
    second.touch()
    os.utime(second, (1000.0, 1000.0))
    assert kubelet.started() == 1000.0
