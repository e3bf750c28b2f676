"""Faults of the cluster: its API server and etcd, on this host, and the node's kubelet. A lab without a cluster has none."""

import base64
import json
import random
import signal
import sys
import time
from pathlib import Path

from agent.report.published import PATH as PUBLISHED
from lab import Node, instance
from lab.cluster import join
from lab.cluster.commands import plane_of
from lab.cluster.daemon import Daemon
from lab.node import wait
from tests.chaos.bad_api_server import ANSWERS
from tests.chaos.faults import Fault, Host

HOLDS = 15.0
"""Seconds without the API server, or with a bad one: longer than the reporter waits for an answer."""

GROUP = "the cluster"
CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
TOKEN = "/etc/trackbed/kubernetes-secret"  # noqa: S105  the name of a file
KEPT = "/root/kept-token"
KUBELET = "systemctl is-active --quiet kubelet"


def _api_server_away(node: Node, chance: random.Random) -> None:
    plane = plane_of(instance.named())
    plane.kill_api_server()
    time.sleep(HOLDS)  # the fault lasts so long; nothing is waited for
    plane.start_api_server()


def _etcd_away(node: Node, chance: random.Random) -> None:
    plane = plane_of(instance.named())
    Daemon("etcd", plane.folder).stop(signal.SIGKILL)
    time.sleep(HOLDS)  # as above
    # The API server ends by itself if etcd is away for long.
    plane.start()


def _answers(how: str) -> Host:
    """A script that puts another server with bad answers on the API server's port, with its certificate."""

    def fault(node: Node, chance: random.Random) -> None:
        plane = plane_of(instance.named())
        plane.kill_api_server()
        certificate = plane.folder / "pki" / "server-kube-apiserver.crt"
        bad = Daemon("bad-api-server", plane.folder)
        program = str(Path(__file__).with_name("bad_api_server.py"))
        bad.start([sys.executable, program, str(plane.ports.api), str(certificate), how])
        try:
            time.sleep(HOLDS)  # as above
        finally:
            bad.stop(signal.SIGKILL)
            plane.start_api_server()

    return fault


def forged(node: str) -> str:
    """A token for a node's reporter that is newer than any other, and that no API server has signed."""
    now = time.time()
    claims = {"iat": now, "exp": now + 86400, "kubernetes.io": {"node": {"name": node, "uid": "forged"}}}
    part = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{part}.forged"


def _token_refused(node: Node, chance: random.Random) -> None:
    script = f"cp -p {TOKEN} {KEPT}; cat > {TOKEN}; systemctl restart trackbed-reporter"
    node.run(["sh", "-euc", script], timeout=120, check=True, stdin=forged(join.node_name(node)))
    says = f"jq -e .refused {PUBLISHED}"
    wait(lambda: node.run(["sh", "-c", says]).returncode == 0, 120, f"{node.name}: the reporter says why")


CLUSTER = (
    Fault(f"the API server is away for {HOLDS:.0f} s", GROUP, mutes=True, needs=KUBELET, host=_api_server_away),
    Fault(f"etcd is away for {HOLDS:.0f} s", GROUP, mutes=True, needs=KUBELET, host=_etcd_away),
    *(
        Fault(f"the API server {what} for {HOLDS:.0f} s", GROUP, mutes=True, needs=KUBELET, host=_answers(how))
        for how, what in ANSWERS.items()
    ),
    Fault(
        f"the reporter has a token that is refused, for {HOLDS:.0f} s",
        GROUP,
        end=f"cat {KEPT} > {TOKEN}; rm {KEPT}; systemctl restart trackbed-reporter",
        holds=HOLDS,
        mutes=True,
        needs=f"{KUBELET} && test -s {TOKEN}",
        host=_token_refused,
    ),
    Fault("the kubelet restarted", GROUP, "systemctl restart kubelet", needs=KUBELET),
    Fault(
        "the kubelet's checkpoint of random bytes, and the kubelet restarted",
        GROUP,
        f"head -c 4096 /dev/urandom > {CHECKPOINT}; systemctl restart kubelet",
        needs=f"{KUBELET} && test -e {CHECKPOINT}",
    ),
)
