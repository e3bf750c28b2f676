"""Faults of the cluster: its API server and etcd, on this host, and the node's kubelet. A lab without a cluster has none."""

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from attrs import field, frozen

from agent.report.published import PATH as PUBLISHED
from lab import Node, instance
from lab.cluster import join
from lab.cluster.commands import plane_of
from lab.cluster.daemon import Daemon
from lab.node import wait
from tests.chaos.faults import Fault, Host
from tests.http_server import Request, serving
from tests.unit.reporter.scripted import token_of

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


@frozen
class Bad:
    """Answers of another server in the API server's place. ``wait``: seconds until each; ``headers``: what all have.

    ``what``: what such a server does.
    """

    what: str
    status: int = 200
    body: str | bytes = '{"kind": "Status", "status": "Failure"}'
    headers: Mapping[str, str] = field(factory=dict)
    wait: float = 0.0

    @contextmanager
    def serving(self, certificate: Path, port: int = 0) -> Iterator[str]:
        """Serve with a certificate that has its key beside it; the URL."""
        over = Event()

        def answer(request: Request) -> tuple[int, str | bytes] | None:
            return None if over.wait(self.wait) else (self.status, self.body)

        json = {"Content-Type": "application/json", **self.headers}
        with serving(answer, certificate, json, key=certificate.with_suffix(".key"), port=port) as url:
            try:
                yield url
            finally:
                over.set()


BAD = (
    Bad("answers 429", 429, headers={"Retry-After": "1"}),
    Bad("answers 500", 500),
    Bad("answers garbage", body=os.urandom(4096)),
    Bad("accepts requests and says nothing", wait=3600),
    Bad("cuts its answers short", headers={"Content-Length": "4096", "Connection": "close"}),
    Bad("takes 3 s for each answer, and refuses it", 503, wait=3.0),
)


def _answers(bad: Bad) -> Host:
    """A fault that puts such a server on the API server's port, with its certificate."""

    def fault(node: Node, chance: random.Random) -> None:
        plane = plane_of(instance.named())
        plane.kill_api_server()
        try:
            with bad.serving(plane.folder / "pki" / "server-kube-apiserver.crt", plane.ports.api):
                time.sleep(HOLDS)  # as above
        finally:
            plane.start_api_server()

    return fault


def forged(node: str) -> str:
    """A token for a node's reporter that is newer than any other, and that no API server has signed."""
    return token_of(node, "forged", time.time(), 86400)


def _token_refused(node: Node, chance: random.Random) -> None:
    script = f"cp -p {TOKEN} {KEPT}; cat > {TOKEN}; systemctl restart trackbed-reporter"
    node.run(["sh", "-euc", script], timeout=120, check=True, stdin=forged(join.node_name(node)))
    says = f"jq -e .refused {PUBLISHED}"
    wait(lambda: node.run(["sh", "-c", says]).returncode == 0, 120, f"{node.name}: the reporter says why")


CLUSTER = (
    Fault(f"the API server is away for {HOLDS:.0f} s", GROUP, mutes=True, needs=KUBELET, host=_api_server_away),
    Fault(f"etcd is away for {HOLDS:.0f} s", GROUP, mutes=True, needs=KUBELET, host=_etcd_away),
    *(
        Fault(f"the API server {bad.what} for {HOLDS:.0f} s", GROUP, mutes=True, needs=KUBELET, host=_answers(bad))
        for bad in BAD
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
