"""Makes the lab's nodes members of a cluster, by the steps and in the places of kubeadm."""

import json
import secrets
import subprocess
from pathlib import Path
from typing import Any

from agent.report import names
from lab.cluster import bundle
from lab.cluster.control_plane import GATEWAY, ControlPlane
from lab.errors import LabError
from lab.hardware import ALL_MACHINES
from lab.node import Node, wait
from lab.progress import step

READY_S = 240.0
INSTALL_S = 3600.0
"""A limit for hangs only: on a host with a load of 20 on two CPUs, a node had not unpacked 125 MiB after 600 s."""

SERVICE = "10.96.0.1"
"""The address of the Service `kubernetes`, at which pods find the API server."""

# What kube-proxy would do, for the only Service of the lab.
SERVICE_SOCKET = f"""[Socket]
ExecStartPre=ip addr replace {SERVICE}/32 dev lo
ListenStream={SERVICE}:443

[Install]
WantedBy=sockets.target
"""
SERVICE_PROXY = "[Service]\nExecStart=/usr/lib/systemd/systemd-socket-proxyd {}:{}\n"
POD_NETWORK = "10.88.{}.0/24"
# Otherwise statistics of every cgroup, every ten seconds, keep an emulated CPU busy.
FLAGS = "KUBELET_KUBEADM_ARGS=--hostname-override={} --housekeeping-interval=60s\n"
BOOTSTRAPPERS = "system:bootstrappers:kubeadm:default-node-token"


def install(node: Node) -> None:
    """Install containerd, the kubelet and the images on a node, unless it has them, and start containerd."""
    archive = bundle.ensure()
    mark = f"/var/lib/trackbed-lab/{archive.name}"
    if node.run(["test", "-e", mark]).returncode == 0:
        return
    what = f"{node.name}: containerd, kubelet and images ({archive.stat().st_size >> 20} MiB)"
    with step(what, usual_s=node.accelerator.usual(40)):
        _unpack(node, archive)
        node.write("/etc/cni/net.d/10-lab.conflist", json.dumps(_network(node), indent=2))
        node.sh(
            f"""
            systemctl daemon-reload
            systemctl enable --now --quiet containerd
            for image in /{bundle.IMAGES}/*.tar; do ctr -n k8s.io images import "$image" >/dev/null; done
            rm -r /{bundle.IMAGES}
            touch {mark}
            """,
            timeout=INSTALL_S,
        )


def join(plane: ControlPlane, node: Node) -> str:
    """Start a node's kubelet with a bootstrap token for its certificate, as `kubeadm join` does. Returns the Node's name."""
    name = node_name(node)
    node.sh("install -d -m 755 /etc/kubernetes/pki")
    node.write("/etc/kubernetes/pki/ca.crt", plane.authority.pair.certificate.read_text())
    node.write("/etc/kubernetes/bootstrap-kubelet.conf", invitation(plane, node), mode="600")
    node.write("/var/lib/kubelet/kubeadm-flags.env", FLAGS.format(name))
    node.write("/etc/systemd/system/api-server.socket", SERVICE_SOCKET)
    node.write("/etc/systemd/system/api-server.service", SERVICE_PROXY.format(GATEWAY, plane.ports.api))
    node.sh("systemctl daemon-reload; systemctl enable --quiet api-server.socket; systemctl restart api-server.socket")
    # These may be from an earlier cluster of the same name.
    node.sh("rm -rf /etc/kubernetes/kubelet.conf /var/lib/kubelet/pki; systemctl enable --quiet kubelet")
    node.sh("systemctl restart kubelet", timeout=READY_S)
    return name


def invitation(plane: ControlPlane, node: Node) -> str:
    """A kubeconfig with a new bootstrap token, with which a node's kubelet asks for its certificate."""
    return plane.bearer(f"bootstrap-{node.name}", _token(plane), plane.node_url).read_text()


def ready(plane: ControlPlane, name: str) -> bool:
    """Whether a Node exists and its condition Ready is True."""
    answer = plane.try_kubectl("get", "node", name, "-o", "json")
    if answer.returncode != 0:
        return False
    conditions = json.loads(answer.stdout).get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def wait_ready(plane: ControlPlane, node: Node) -> None:
    """Wait until :func:`ready`."""
    name = node_name(node)
    wait(lambda: ready(plane, name), READY_S, f"Node {called(name, node.name)}: Ready")


def called(name: str, machine: str) -> str:
    """A Node's name, and that of its machine in the lab if it has another one."""
    return name if name == machine else f"{name} (the lab's {machine})"


def node_name(node: Node) -> str:
    """The Node's name by the node's spec; before the first deploy, its host name."""
    spec = node.run(["cat", names.SPEC_FILE])
    return str(json.loads(spec.stdout)["node_name"]) if spec.returncode == 0 else node.name


def _network(node: Node) -> dict[str, Any]:
    subnet = POD_NETWORK.format(ALL_MACHINES.index(node.machine) + 1)
    ipam = {"type": "host-local", "ranges": [[{"subnet": subnet}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipam": ipam}
    return {"cniVersion": "1.0.0", "name": "lab", "plugins": [bridge]}


def _token(plane: ControlPlane) -> str:
    """Make a bootstrap token with which any node may join, and give its holders the rights that kubeadm gives them."""
    number, secret = secrets.token_hex(3), secrets.token_hex(8)
    plane.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"bootstrap-token-{number}", "namespace": "kube-system"},
            "type": "bootstrap.kubernetes.io/token",
            "stringData": {
                "token-id": number,
                "token-secret": secret,
                "usage-bootstrap-authentication": "true",
                "auth-extra-groups": BOOTSTRAPPERS,
            },
        },
        binding("kubelet-bootstrap", "system:node-bootstrapper", BOOTSTRAPPERS),
        binding(
            "node-autoapprove-bootstrap",
            "system:certificates.k8s.io:certificatesigningrequests:nodeclient",
            BOOTSTRAPPERS,
        ),
        binding(
            "node-autoapprove-certificate-rotation",
            "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient",
            "system:nodes",
        ),
    )
    return f"{number}.{secret}"


def binding(name: str, role: str, group: str) -> dict[str, Any]:
    """A ClusterRoleBinding of a group to a ClusterRole."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"lab:{name}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group}],
    }


def _unpack(node: Node, archive: Path) -> None:
    words = [
        "ssh",
        "-F",
        str(node.ssh_config),
        node.name,
        "--",
        "tar -C / --zstd --no-same-owner --keep-directory-symlink -x",
    ]
    try:
        with archive.open("rb") as content:
            done = subprocess.run(words, stdin=content, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise LabError(f"{node.name}: unpacking {archive} took longer than {INSTALL_S:.0f} s") from None
    if done.returncode != 0:
        raise LabError(f"{node.name}: unpacking {archive} failed: {done.stderr.strip()}")
