"""A real control plane on this host's loopback: etcd, API server, controller manager and scheduler.

It needs no node, and starts in seconds once its programs are built (about five minutes, once):

    plane = control_plane.create(folder)         certificates, keys, ports; existing ones stay
    plane.start()                                until the API server says that it is ready
    plane.kubectl("get", "nodes")                as the administrator (plane.admin is that kubeconfig)
    plane.get("nodes")                           the same as JSON
    plane.apply({...}, {...})                    manifests as dictionaries
    plane.identity("trackbed:node:node1")        a kubeconfig with a client certificate of that user and of groups
    plane.audit()                                the audit log, with the bodies of writes to Nodes and Leases
    plane.kill_api_server(), plane.start()       an outage
    plane.empty()                                etcd loses everything; the control plane is up again afterwards
    plane.stop()

A suite takes the fixture `control_plane` of tests/cluster/conftest.py. Nodes of the lab reach the API server at
`plane.node_url`, programs of this host at `plane.url`.
"""

import json
import os
import shutil
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agent.runtime import write_atomically
from lab import repository
from lab.cluster import egress, programs
from lab.cluster.certificates import Authority, inline, write_kubeconfig
from lab.cluster.daemon import Daemon
from lab.errors import LabError
from lab.instance import free_port
from lab.node import wait

READY_S = 120.0
ROOT = Path(__file__).parent.parent.parent
GATEWAY = repository.HOST
"""The address at which the nodes reach this host's loopback."""

EGRESS, ETCD, API_SERVER = "egress", "etcd", "kube-apiserver"
CONTROLLERS, SCHEDULER = "kube-controller-manager", "kube-scheduler"
"""Its processes."""

SERVICES = "10.96.0.0/16"
SERVED_AS = (
    "127.0.0.1",
    GATEWAY,
    "10.96.0.1",
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
)
# Less memory for a little more CPU time: the lab's nodes need the memory.
FRUGAL = {"GOGC": "50"}
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "Request",
            "verbs": ["create", "update", "patch", "delete"],
            "resources": [
                {"group": "", "resources": ["nodes", "nodes/status"]},
                {"group": "coordination.k8s.io", "resources": ["leases"]},
                {"group": "certificates.k8s.io", "resources": ["*"]},
            ],
        },
        {"level": "Metadata"},
    ],
}


@attrs.frozen
class Ports:
    """The control plane's ports, all on 127.0.0.1."""

    api: int
    etcd: int
    etcd_peer: int


@attrs.frozen
class ControlPlane:
    """A control plane in a folder of its own. Nothing is cached: each method reads the present state."""

    folder: Path
    ports: Ports
    # The lab whose kubelets the API server can reach, for `kubectl logs` and `exec`.
    lab: str | None = None
    version: str = attrs.field(factory=programs.kubernetes_version)

    @property
    def url(self) -> str:
        """The API server's URL on this host."""
        return f"https://127.0.0.1:{self.ports.api}"

    @property
    def node_url(self) -> str:
        """The API server's URL on a node of the lab."""
        return f"https://{GATEWAY}:{self.ports.api}"

    @property
    def authority(self) -> Authority:
        """The authority that signs the cluster's certificates. Clients must trust `authority.pair.certificate`."""
        return Authority(self.folder / "pki")

    @property
    def admin(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        """The audit log: one JSON document a line, ordered by the time at which requests ended."""
        return self.folder / "audit.log"

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        """Its processes, in the order of their start."""
        names = (*(() if self.lab is None else (EGRESS,)), ETCD, API_SERVER, CONTROLLERS, SCHEDULER)
        return tuple(map(self._daemon, names))

    @property
    def api_server(self) -> Daemon:
        """The API server's process."""
        return self._daemon(API_SERVER)

    def start(self) -> None:
        """Start the processes that do not run, and wait until the API server answers."""
        if self.lab is not None:
            self._daemon(EGRESS).start(egress.command(self._egress_socket, self.lab), {"PYTHONPATH": str(ROOT)})
        etcd = f"http://127.0.0.1:{self.ports.etcd}"
        self._daemon(ETCD).start(
            [
                programs.etcd(),
                *("--name", "lab", "--data-dir", self._data, "--unsafe-no-fsync", "--logger", "zap"),
                *("--listen-client-urls", etcd, "--advertise-client-urls", etcd),
                *("--listen-peer-urls", f"http://127.0.0.1:{self.ports.etcd_peer}"),
                *("--initial-advertise-peer-urls", f"http://127.0.0.1:{self.ports.etcd_peer}"),
                *("--initial-cluster", f"lab=http://127.0.0.1:{self.ports.etcd_peer}"),
            ]
        )
        self.start_api_server()
        common = ["--leader-elect=false", "--secure-port=0", "--v=1"]
        self._daemon(CONTROLLERS).start(
            [
                programs.kubernetes(CONTROLLERS, self.version),
                *common,
                f"--kubeconfig={self.folder / 'controllers.kubeconfig'}",
                "--use-service-account-credentials=true",
                f"--service-account-private-key-file={self.authority.service_accounts.key}",
                f"--root-ca-file={self.authority.pair.certificate}",
                f"--cluster-signing-cert-file={self.authority.pair.certificate}",
                f"--cluster-signing-key-file={self.authority.pair.key}",
                *self._no_kubelets("--controllers=*,-node-lifecycle-controller"),
            ],
            self._thrift,
        )
        self._daemon(SCHEDULER).start(
            [
                programs.kubernetes(SCHEDULER, self.version),
                *common,
                f"--kubeconfig={self.folder / 'scheduler.kubeconfig'}",
            ],
            self._thrift,
        )
        # The controller manager makes this account; until then the API server refuses pods.
        wait(lambda: self._answers("get", "serviceaccount", "default"), READY_S, "the default service account")

    def start_api_server(self) -> None:
        """Start the API server alone, and wait until it is ready."""
        server = self.folder / "pki" / "server-kube-apiserver"
        client = self.folder / "pki" / "client-kube-apiserver-kubelet-client"
        accounts = self.authority.service_accounts
        self.api_server.start(
            [
                programs.kubernetes(API_SERVER, self.version),
                *("--bind-address=127.0.0.1", f"--secure-port={self.ports.api}", f"--advertise-address={GATEWAY}"),
                *(f"--etcd-servers=http://127.0.0.1:{self.ports.etcd}", f"--service-cluster-ip-range={SERVICES}"),
                f"--client-ca-file={self.authority.pair.certificate}",
                *(f"--tls-cert-file={server}.crt", f"--tls-private-key-file={server}.key"),
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={accounts.certificate}",
                f"--service-account-signing-key-file={accounts.key}",
                *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"),
                *("--enable-bootstrap-token-auth=true", "--allow-privileged=true"),
                *(f"--kubelet-client-certificate={client}.crt", f"--kubelet-client-key={client}.key"),
                "--kubelet-preferred-address-types=InternalIP",
                *(f"--audit-policy-file={self.folder / 'audit-policy.json'}", f"--audit-log-path={self.audit_log}"),
                *("--profiling=false", "--v=1"),
                *self._no_kubelets("--disable-admission-plugins=TaintNodesByCondition"),
                *self._egress_arguments(),
            ],
            self._thrift,
        )
        wait(self._ready, READY_S, f"the API server (its log is {self.api_server.log})")

    def kill_api_server(self) -> None:
        """Kill the API server. The outage lasts until :meth:`start_api_server` or :meth:`start`."""
        self.api_server.stop(signal.SIGKILL)

    def empty(self) -> None:
        """Delete everything in etcd and start again. Certificates stay valid, tokens do not."""
        self.stop()
        shutil.rmtree(self._data, ignore_errors=True)
        self.start()

    def stop(self) -> None:
        """Stop all processes; etcd's data and the logs stay."""
        for daemon in reversed(self.daemons):
            # SIGKILL: the API server is slow to end by itself, and what it loses does not matter.
            daemon.stop(signal.SIGKILL)

    def discard(self) -> None:
        """Stop the processes, and delete the folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def running(self) -> bool:
        """Whether all processes run."""
        return all(daemon.pid() is not None for daemon in self.daemons)

    def kubectl(
        self, *words: str, stdin: str | None = None, kubeconfig: Path | None = None, timeout: float = 60.0
    ) -> str:
        """Run kubectl, as the administrator unless another kubeconfig is given. A failure raises a LabError."""
        done = self.try_kubectl(*words, stdin=stdin, kubeconfig=kubeconfig, timeout=timeout)
        if done.returncode != 0:
            raise LabError(f"kubectl {' '.join(words)} failed with status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def try_kubectl(
        self, *words: str, stdin: str | None = None, kubeconfig: Path | None = None, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl like :meth:`kubectl`, but return a failure instead of raising it."""
        try:
            return subprocess.run(
                self._kubectl_words(*words, kubeconfig=kubeconfig),
                input=stdin or "",
                capture_output=True,
                text=True,
                timeout=timeout,
                env=self._kubectl_environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LabError(f"kubectl {' '.join(words)} took longer than {timeout:.0f} s") from None

    def follow(self, *words: str) -> subprocess.Popen[bytes]:
        """Start kubectl as the administrator, for a command that prints until it is killed. Its output is not buffered here."""
        return subprocess.Popen(
            self._kubectl_words(*words),
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._kubectl_environment,
        )

    def get(self, *words: str) -> dict[str, Any]:
        """`kubectl get ... -o json`: an object, or a list with `items`."""
        document: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return document

    def apply(self, *manifests: Mapping[str, Any]) -> None:
        """Create or change objects."""
        document = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "--filename=-", stdin=json.dumps(document))

    def wait_established(self, *words: str) -> None:
        """Wait until the API server serves the kinds of CRDs, named by kubectl's words."""
        # kubectl fails while a CRD has no conditions at all, which is so for a moment.
        words = ("wait", "--for=condition=Established", *words)
        wait(lambda: self._answers(*words), READY_S, f"kubectl {' '.join(words)}")

    def identity(self, user: str, groups: Sequence[str] = (), server: str | None = None) -> Path:
        """A kubeconfig for a user by client certificate; ``server`` is :attr:`url`, or :attr:`node_url`."""
        pair = self.authority.client(user, groups)
        return write_kubeconfig(
            pair.certificate.with_suffix(".kubeconfig"),
            server or self.url,
            self.authority.pair.certificate,
            {"client-certificate-data": inline(pair.certificate), "client-key-data": inline(pair.key)},
        )

    def bearer(self, name: str, token: str, server: str | None = None) -> Path:
        """A kubeconfig with a token."""
        file = self.folder / "pki" / f"token-{name}.kubeconfig"
        return write_kubeconfig(file, server or self.url, self.authority.pair.certificate, {"token": token})

    def audit(self) -> list[dict[str, Any]]:
        """The audit log's events so far, oldest first."""
        if not self.audit_log.exists():
            return []
        lines = self.audit_log.read_text().split("\n")
        # Leave out what follows the last newline: an event may be half written.
        return [json.loads(line) for line in lines[:-1]]

    def _kubectl_words(self, *words: str, kubeconfig: Path | None = None) -> list[str]:
        return [str(programs.kubernetes("kubectl")), f"--kubeconfig={kubeconfig or self.admin}", *words]

    @property
    def _kubectl_environment(self) -> dict[str, str]:
        # kubectl caches the API server's resources by its port, and ports are used again by other servers.
        return {**os.environ, "KUBECACHEDIR": str(self.folder / "kubectl-cache")}

    def _no_kubelets(self, *options: str) -> tuple[str, ...]:
        """Options for Nodes that are objects only.

        No kubelet renews them, so 50 s after a Node is created the controller would taint it and set its conditions to Unknown.
        """
        return () if self.lab else options

    @property
    def _thrift(self) -> Mapping[str, str]:
        return FRUGAL if self.lab else {}

    def _daemon(self, name: str) -> Daemon:
        return Daemon(name, self.folder)

    @property
    def _data(self) -> Path:
        return self.folder / "etcd"

    @property
    def _egress_socket(self) -> Path:
        return self.folder / "egress.sock"

    def _egress_arguments(self) -> list[str]:
        if self.lab is None:
            return []
        file = self.folder / "egress.json"
        file.write_text(json.dumps(egress.configuration(self._egress_socket), indent=2))
        return [f"--egress-selector-config-file={file}"]

    def _ready(self) -> bool:
        self.api_server.must_run()
        self._daemon(ETCD).must_run()
        trusted = ssl.create_default_context(cafile=str(self.authority.pair.certificate))
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5, context=trusted) as answer:  # noqa: S310 - https
                return bool(answer.status == 200)
        except OSError:
            return False

    def _answers(self, *words: str) -> bool:
        return self.try_kubectl(*words).returncode == 0


def create(folder: Path, lab: str | None = None, version: str | None = None) -> ControlPlane:
    """The control plane of a folder: with the existing keys and ports, or with new ones.

    :raises LabError: the file with its ports is damaged.
    :param lab: the lab whose nodes will join it; without it there are no nodes.
    :param version: Kubernetes' version, which is not kept in the folder; None: :func:`programs.kubernetes_version`.
    """
    version = version or programs.kubernetes_version()
    known = folder / "ports.json"
    if known.exists():
        try:
            return ControlPlane(folder, Ports(**json.loads(known.read_text())), lab, version)
        except (ValueError, TypeError):
            raise LabError(f"{known} is damaged", "Run `python -m lab cluster down`, then `up`.") from None
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    plane = ControlPlane(folder, Ports(free_port(), free_port(), free_port()), lab, version)
    plane.authority.create()
    plane.authority.server("kube-apiserver", SERVED_AS)
    plane.authority.client("kube-apiserver-kubelet-client", ["system:masters"])
    for file, user, groups in (
        (plane.admin, "admin", ("system:masters",)),
        (folder / "controllers.kubeconfig", "system:kube-controller-manager", ()),
        (folder / "scheduler.kubeconfig", "system:kube-scheduler", ()),
    ):
        plane.identity(user, groups).rename(file)
    (folder / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY, indent=2))
    write_atomically(known, json.dumps(attrs.asdict(plane.ports)))
    return plane
