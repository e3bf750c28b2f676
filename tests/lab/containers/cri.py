"""A client of a container engine's CRI, as the kubelet is one: pods and containers without a cluster.

Field numbers are those of k8s.io/cri-api, pkg/apis/runtime/v1/api.proto.
"""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import grpc

from agent.linux.grpc import fields
from lab import Node
from tests.lab.conftest import eventually

CONTAINERD, CRIO = "/run/containerd/containerd.sock", "/run/crio/crio.sock"
HOST_NETWORK = 2


def message(*parts: tuple[int, object]) -> bytes:
    """A message: numbers are varints, all else has a length."""
    out = b""
    for number, value in parts:
        if isinstance(value, int):
            out += _varint(number << 3) + _varint(value)
        else:
            content = value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[call-overload]
            out += _varint(number << 3 | 2) + _varint(len(content)) + content
    return out


def _varint(value: int) -> bytes:
    more = b""
    while value > 0x7F:
        more += bytes([value & 0x7F | 0x80])
        value >>= 7
    return more + bytes([value])


@attrs.frozen
class Cri:
    """The connection."""

    channel: grpc.Channel

    def call(self, method: str, request: bytes) -> dict[int, bytes]:
        """A unary call; the fields of the answer, the last of each number."""
        done = self.channel.unary_unary(f"/runtime.v1.RuntimeService/{method}")(request, timeout=600)
        return dict(fields(done))

    def pod(self, name: str) -> tuple[bytes, bytes]:
        """Run a pod sandbox in the node's network, by the default runtime; its id, and what it was made of."""
        network = message((1, HOST_NETWORK))
        linux = message((1, "test.slice"), (2, message((1, network))))
        metadata = message((1, name), (2, name), (3, "default"))
        config = message((1, metadata), (8, linux))
        return self.call("RunPodSandbox", message((1, config)))[1], config

    def container(
        self, pod: tuple[bytes, bytes], image: str, *command: str, cdi: str | None = None, **environment: str
    ) -> bytes:
        """Start a container in it; its id."""
        given = [(6, message((1, name), (2, value))) for name, value in environment.items()]
        devices = [(17, message((1, cdi)))] if cdi else []
        config = message(
            # A name of its own: one that did not start keeps it.
            (1, message((1, f"at-{time.monotonic_ns()}"))),
            # Twice: CRI-O verifies the signature by the name that the user has given.
            (2, message((1, image), (18, image))),
            *((3, word) for word in command),
            *given,
            *devices,
        )
        made = self.call("CreateContainer", message((1, pod[0]), (2, config), (3, pod[1])))[1]
        self.call("StartContainer", message((1, made)))
        return made

    def run(self, container: bytes, *command: str) -> str:
        """Run a command in a container; what it prints."""
        done = self.call("ExecSync", message((1, container), *((2, word) for word in command), (3, 60)))
        return done.get(1, b"").decode()


@contextmanager
def connect(node: Node, socket: str = CONTAINERD) -> Iterator[Cri]:
    """To an engine of the node, its socket brought here by ssh."""
    with TemporaryDirectory(prefix="trackbed-cri-") as folder:
        here = Path(folder) / "engine.sock"
        forward = ("-o", "ControlPath=none", "-N", "-L", f"{here}:{socket}")
        with subprocess.Popen(["ssh", "-F", node.ssh_config, *forward, node.name]) as tunnel:
            try:
                eventually("the tunnel", here.exists)
                with grpc.insecure_channel(f"unix:{here}") as channel:
                    yield Cri(channel)
            finally:
                tunnel.terminate()
