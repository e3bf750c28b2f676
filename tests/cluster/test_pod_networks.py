"""The rendered networks for pods, with the real Multus, whereabouts and macvlan and a real API server.

Two network namespaces of this host are the nodes, joined by a cable, and two more are the pods. The test is the container
engine: it calls Multus as one does. So Multus and whereabouts have the rights that are rendered for them, and no others.
"""

import json
import os
import shlex
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import attrs
import pytest

from agent.linux.mount import LIBC, last_error
from agent.spec.node import from_mapping
from lab.cluster import manifests, network_plugins, programs
from lab.cluster.control_plane import ControlPlane
from lab.go import go_programs
from tasks.kubernetes.manifests import DEVICE_PLUGINS
from tasks.kubernetes.manifests.discovered import discover
from tasks.kubernetes.manifests.rendered import manifests as made
from tests.cluster.conftest import LONG
from tests.cluster.rendered import address
from tests.cluster.reporter.relay import Relay
from tests.deploy.hardware import RAIL0, hardware
from tests.private_namespace import pod
from tests.stand_ins import text_file

RAIL = str(RAIL0["netdevs"][0]["name"])
PLUGINS = ("multus", "whereabouts")
POOLS = "ippools.whereabouts.cni.cncf.io"
CONFIGURATION = "/etc/cni/net.d/whereabouts.d"
CLONE_NEWNET = 0x40000000

# The programs of the plugins take minutes to build.
pytestmark = pytest.mark.campaign


@attrs.frozen
class Place:
    """A process in a network namespace and a mount namespace of its own: a node, or a pod."""

    pid: int

    @property
    def path(self) -> str:
        """The file of its network namespace."""
        return f"/proc/{self.pid}/ns/net"

    def sh(self, script: str, stdin: str = "", **environment: str) -> str:
        """Run a script there."""
        words = ["nsenter", f"--target={self.pid}", "--net", "--mount", "sh", "-euc", script]
        done = subprocess.run(
            words,
            input=stdin,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def socket(self, make: Callable[[], socket.socket]) -> socket.socket:
        """A socket that belongs to this network namespace, wherever it is used."""
        got: list[socket.socket] = []

        def there() -> None:
            with Path(self.path).open() as namespace:
                if LIBC.setns(namespace.fileno(), CLONE_NEWNET):
                    raise last_error("setns")
            got.append(make())

        thread = threading.Thread(target=there)
        thread.start()
        thread.join(60)
        return got[0]


@contextmanager
def place(folder: Path) -> Iterator[Place]:
    """A new one. What it writes to /etc and /var/lib stays in the folder."""
    mounts = []
    for lower in ("/etc", "/var/lib"):
        upper, work = (folder / f"{lower.strip('/').replace('/', '-')}-{kind}" for kind in ("upper", "work"))
        for each in (upper, work):
            each.mkdir(parents=True)
        mounts.append(f"mount -t overlay overlay -o lowerdir={lower},upperdir={upper},workdir={work} {lower}")
    with pod("--mount", setup=" && ".join([*mounts, "ip link set lo up"])) as pid:
        yield Place(int(pid))


@pytest.fixture(scope="module")
def rendered(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of what is rendered for a node with a RoCE rail, applied."""
    network_plugins.build()
    if missing := set(PLUGINS) - set(network_plugins.built()):
        pytest.skip(f"the Go module proxy does not serve {' and '.join(sorted(missing))}")
    folder = tmp_path_factory.mktemp("manifests")
    wanted = DEVICE_PLUGINS.read({"device_plugins": manifests.wanted(folder, PLUGINS)}, "node1")
    assert wanted is not None
    spec = from_mapping({"node_name": "node1", "nics": [{"name": "rail0", "select": {"pci": RAIL0["address"]}}]})
    for name, text in made(wanted, {"node1": discover(hardware(RAIL0), spec, {"rdma": "hca"})}).items():
        text_file(folder / name, text)
    manifests.apply(control_plane, folder)
    # No node has the label that they select: they exist, and wait.
    control_plane.kubectl("apply", "-f", str(folder / "macvlan-test-pods.yaml"))
    yield folder
    control_plane.kubectl("delete", "-f", str(folder / "macvlan-test-pods.yaml"))
    for each in (folder, folder / "network-plugins"):
        control_plane.kubectl("delete", "-k", str(each), timeout=120)


@attrs.frozen
class Engine:
    """What calls Multus for the pods of one node."""

    plane: ControlPlane
    node: Place
    number: int
    programs: str

    def call(self, command: str, pod: str, there: Place) -> dict[str, Any]:
        """Have a pod's netdevs made (ADD) or removed (DEL)."""
        uid = self.plane.get("pod", pod)["metadata"]["uid"]
        container = f"{pod}-container"
        arguments = {"K8S_POD_NAMESPACE": "default", "K8S_POD_NAME": pod, "K8S_POD_UID": uid}
        output = self.node.sh(
            "multus",
            stdin=json.dumps(self._configuration()),
            PATH=f"{self.programs}:{os.environ['PATH']}",
            CNI_COMMAND=command,
            CNI_CONTAINERID=container,
            CNI_NETNS=there.path,
            CNI_IFNAME="eth0",
            CNI_PATH=self.programs,
            CNI_ARGS=";".join(f"{key}={value}" for key, value in {"IgnoreUnknown": "1", **arguments}.items()),
        )
        return json.loads(output) if output else {}

    def _configuration(self) -> dict[str, Any]:
        """As Multus writes it for itself, with the cluster's own network in it."""
        cluster = {
            "cniVersion": "0.3.1",
            "name": "cluster",
            "type": "bridge",
            "bridge": "cni0",
            "ipam": {"type": "host-local", "subnet": f"10.88.{self.number}.0/24"},
        }
        return {
            "cniVersion": "0.3.1",
            "name": "multus-cni-network",
            "type": "multus",
            "kubeconfig": "/etc/cni/net.d/multus.d/multus.kubeconfig",
            "delegates": [cluster],
        }


def credentials(plane: ControlPlane, account: str) -> str:
    """A kubeconfig with a token of a plugin's account, as the plugin's DaemonSet writes it to the node."""
    token = plane.kubectl("-n", manifests.NAMESPACE, "create", "token", account).strip()
    config = json.loads(plane.kubectl("config", "view", "--raw", "-o", "json", kubeconfig=plane.bearer(account, token)))
    config["contexts"][0]["context"]["namespace"] = manifests.NAMESPACE
    return json.dumps(config)


@pytest.fixture
def engines(control_plane: ControlPlane, rendered: Path, tmp_path: Path) -> Iterator[list[Engine]]:
    """Two nodes whose rails are joined, each with the plugins and their credentials."""
    links = tmp_path / "programs"
    links.mkdir()
    for program in go_programs.ensure(programs.CNI).iterdir():
        (links / program.name).symlink_to(program)
    (links / "multus").symlink_to(programs.MULTUS.program("multus"))
    (links / "whereabouts").symlink_to(programs.WHEREABOUTS.program("cmd"))
    port = control_plane.ports.api
    with ExitStack() as stack:
        nodes = [stack.enter_context(place(tmp_path / f"node{number}")) for number in (1, 2)]
        ends = [f"name {RAIL} mtu 9000 netns {node.pid}" for node in nodes]
        subprocess.run(shlex.split(f"ip link add {ends[0]} type veth peer {ends[1]}"), check=True, timeout=60)
        for number, node in enumerate(nodes, 1):
            node.sh(f"ip link set {RAIL} up; mkdir -p {CONFIGURATION} /etc/cni/net.d/multus.d")
            listener = node.socket(lambda: socket.create_server(("127.0.0.1", port)))
            stack.callback(listener.close)
            Relay(port, listener).start()
            for account, path in (("multus", "/etc/cni/net.d/multus.d"), ("whereabouts", CONFIGURATION)):
                node.sh(f"umask 077; cat > {path}/{account}.kubeconfig", stdin=credentials(control_plane, account))
            own = {"kubeconfig": f"{CONFIGURATION}/whereabouts.kubeconfig"}
            config = {"datastore": "kubernetes", "configuration_path": CONFIGURATION, "kubernetes": own}
            node.sh(f"cat > {CONFIGURATION}/whereabouts.conf", stdin=json.dumps(config))
            node.sh(f"printf node{number} > {CONFIGURATION}/nodename")
        yield [Engine(control_plane, node, number, str(links)) for number, node in enumerate(nodes, 1)]


def assigned(plane: ControlPlane) -> list[str]:
    """The pods that have an address of whereabouts."""
    pools = plane.get(POOLS, "-n", manifests.NAMESPACE)["items"]
    return sorted(each["podref"] for pool in pools for each in pool["spec"]["allocations"].values())


def send(to: socket.socket, data: bytes) -> None:
    """Send the data, and say that this is all."""
    to.sendall(data)
    to.shutdown(socket.SHUT_WR)


def test_pods_on_two_nodes_exchange_data_over_the_netdevs_of_their_annotation(
    control_plane: ControlPlane, engines: list[Engine], tmp_path: Path
) -> None:
    names = ("macvlan-test-server", "macvlan-test-client")
    with ExitStack() as stack:
        pods = [stack.enter_context(place(tmp_path / name)) for name in names]
        for engine, name, pod in zip(engines, names, pods, strict=True):
            engine.call("ADD", name, pod)
        addresses = [address(control_plane, name) for name in names]
        assert len(set(addresses)) == 2
        assert all(ip_address(each) in ip_network(manifests.SUBNET) for each in addresses)
        assert assigned(control_plane) == sorted(f"default/{name}" for name in names)
        for pod, its in zip(pods, addresses, strict=True):
            (netdev,) = json.loads(pod.sh("ip -json -details address show net1"))
            assert (netdev["linkinfo"]["info_kind"], netdev["mtu"]) == ("macvlan", 9000)
            assert its in [each["local"] for each in netdev["addr_info"]]

        data = os.urandom(1 << 20)
        server = pods[0].socket(lambda: socket.create_server((addresses[0], 5001)))
        client = pods[1].socket(lambda: socket.create_connection((addresses[0], 5001), timeout=60))
        with server, client:
            accepted, peer = server.accept()
            with accepted:
                assert peer[0] == addresses[1]
                sending = threading.Thread(target=send, args=(client, data))
                sending.start()
                received = b"".join(iter(lambda: accepted.recv(65536), b""))
                sending.join(60)
        assert received == data

        for engine, name, pod in zip(engines, names, pods, strict=True):
            engine.call("DEL", name, pod)
        assert assigned(control_plane) == []
        assert "net1" not in pods[0].sh("ip link")
