"""A thousand reporters against one API server: what they write when nothing happens, after an outage, and what they cost it."""

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from agent.report import published
from agent.report.names import ACCOUNT, NAMESPACE
from agent.report.records import NicVerdict, to_plain
from agent.reporter.kubernetes.api import MERGE_PATCH, Api, Session, trust
from agent.reporter.kubernetes.identity import RENEWED, TOKENS, BoundToken
from agent.reporter.kubernetes.lease import LEASE_EVERY, LEASES
from agent.reporter.kubernetes.node import time_stamp
from agent.reporter.kubernetes.tokens import Claims, claims_of
from agent.reporter.settings import Quarantine, Settings
from lab.cluster.control_plane import ControlPlane
from tests.cluster.planes import received
from tests.cluster.reporter.fleet_process import Member, Said
from tests.cluster.reporter.reporters import Fixed, by_admin, node, prepare, until
from tests.stand_ins import text_file

ROOT = Path(__file__).parents[3]
FLEET = int(os.environ.get("TRACKBED_TEST_FLEET", "1000"))
NAMES = tuple(f"fleet-{index}" for index in range(FLEET))
# Nodes that kubectl is given at once.
BATCH = 50
STEADY = 300.0
OUTAGE = 60.0
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
# Requests in a second after an outage in which all nodes lost Ready. Each reporter makes two within 15 s (Node and status), two
# within a minute (list and watch): 0.17 of the fleet a second, somewhat more at first. They come two by two, at moments that
# are drawn, so the busiest second is above that by as many standard deviations (the root of twice the rate) as make one in a
# million.
AT_MOST = FLEET / 5 + 5 * math.sqrt(2 * FLEET / 5)

pytestmark = pytest.mark.campaign


@pytest.fixture
def folder() -> Iterator[Path]:
    """What a node's reporter writes at each turn is in /run; a thousand on one disk would wait for each other there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def spent(plane: ControlPlane) -> float:
    """CPU seconds of the API server so far."""
    fields = Path(f"/proc/{plane.api_server.pid()}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_during(plane: ControlPlane, seconds: float) -> float:
    """CPU seconds of the API server in a second, on the average of so many."""
    before = spent(plane)
    time.sleep(seconds)
    return (spent(plane) - before) / seconds


def events(plane: ControlPlane, mark: int) -> list[dict[str, Any]]:
    """The reporters' requests that the audit log has from an event on."""
    return [event for event in plane.audit()[mark:] if event["user"]["username"] == USER]


def tokens_of(plane: ControlPlane, names: Iterable[str], seconds: int = 86400) -> dict[str, str]:
    """A token for each Node's reporter, as a deploy requests them."""
    api = Api(plane.url, by_admin(plane).session)

    def token(name: str) -> str:
        bound = {"apiVersion": "v1", "kind": "Node", "name": name}
        answer = api.ask("POST", TOKENS, body={"spec": {"boundObjectRef": bound, "expirationSeconds": seconds}})
        return str(answer["status"]["token"])

    return {name: token(name) for name in names}


@define
class Fleet:
    """The process with the reporters."""

    plane: ControlPlane
    folder: Path
    tokens: dict[str, str]
    process: subprocess.Popen[str]

    @classmethod
    def start(
        cls, plane: ControlPlane, folder: Path, quarantine: Quarantine | None = None, nics: tuple[NicVerdict, ...] = ()
    ) -> "Fleet":
        for first in range(0, FLEET, BATCH):
            plane.apply(*map(node, NAMES[first : first + BATCH]))
        tokens = tokens_of(plane, NAMES)
        ca = str(plane.authority.pair.certificate)
        members = [
            Member(str(folder / name), Settings(name, plane.url, ca, quarantine=quarantine), token, nics)
            for name, token in tokens.items()
        ]
        (folder / "fleet.json").write_text(json.dumps(to_plain(members)))
        command = [sys.executable, "-m", "tests.cluster.reporter.fleet_process", str(folder / "fleet.json")]
        return cls(plane, folder, tokens, subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True))

    def say(self, said: Said) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(to_plain(said)) + "\n")
        self.process.stdin.flush()

    def all_published(self, ready: bool, deadline: float) -> None:
        def done() -> bool:
            reports = (published.read(self.folder / name / "published.json") for name in self.tokens)
            return all(report is not None and report.ready is ready and report.generation > 1 for report in reports)

        until(done, f"every node is published with ready={ready}", deadline)

    def memory_kib(self) -> int:
        """The process's proportional share of memory."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))

    def renew_barely(self, over: threading.Event, every: float) -> None:
        """The bare minimum: Leases renewed one after the other, one in so many seconds, and nothing else."""
        ca = self.plane.authority.pair.certificate
        # Made before it is looked how much the API server does.
        identities = {name: Fixed(Session(trust(ca), token)) for name, token in self.tokens.items()}

        def renew() -> None:
            due = time.monotonic()
            for name, identity in itertools.cycle(identities.items()):
                due += every
                if over.wait(max(0.0, due - time.monotonic())):
                    return
                api = Api(self.plane.url, identity.session)
                body = {"spec": {"renewTime": time_stamp(time.time(), micro=True)}}
                api.ask("PATCH", f"{LEASES}/{name}", {}, body, MERGE_PATCH)
                api.close()

        threading.Thread(target=renew, daemon=True).start()


def test_a_thousand_reporters_are_quiet_come_back_spread_and_cost_little_more_than_their_leases(
    control_plane: ControlPlane, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plane = control_plane
    prepare(plane)
    idle = cpu_during(plane, 60.0)
    fleet = Fleet.start(plane, folder)
    try:
        fleet.say(Said(True))
        fleet.all_published(True, 600.0)
        time.sleep(LEASE_EVERY[1])  # the first renewals came all at once
        mark = len(plane.audit())
        ours = cpu_during(plane, STEADY)
        written = [event for event in events(plane, mark) if event["verb"] in ("patch", "create", "update")]
        most = max(Counter(event["objectRef"]["name"] for event in written).values())
        resources = {event["objectRef"]["resource"] for event in written}

        mark = len(plane.audit())
        plane.kill_api_server()
        fleet.say(Said(False))
        time.sleep(OUTAGE)
        plane.start_api_server()
        fleet.all_published(False, 300.0)
        rates = Counter(int(received(event)) for event in events(plane, mark))
        memory = fleet.memory_kib()
    finally:
        fleet.process.kill()
    time.sleep(10.0)
    over = threading.Event()
    fleet.renew_barely(over, STEADY / len(written))
    bare = cpu_during(plane, STEADY)
    over.set()
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{FLEET} reporters, {memory / FLEET:.0f} KiB each; steady: {len(written)} writes in {STEADY:.0f} s, at most "
            f"{most} of a node; after {OUTAGE:.0f} s without API server: at most {max(rates.values())} requests in a "
            f"second, {AT_MOST:.0f} allowed, over {max(rates) - min(rates) + 1} s; API server: {idle:.4f} CPU s/s idle, "
            f"{ours:.4f} with the reporters, {bare:.4f} with bare renewals"
        )
    assert resources == {"leases"}
    assert most == 1
    assert max(rates.values()) <= AT_MOST
    assert ours <= bare * 1.05


def test_a_thousand_reporters_renew_their_tokens_at_once(
    control_plane: ControlPlane, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worst case: they draw different times. Each has a token of ten minutes, the shortest that there is."""
    plane = control_plane
    prepare(plane)
    names = [f"renewing-{index}" for index in range(FLEET)]
    for first in range(0, FLEET, BATCH):
        plane.apply(*[node(name) for name in names[first : first + BATCH]])
    ca, identities = str(plane.authority.pair.certificate), []
    for name, token in tokens_of(plane, names, 600).items():
        own = folder / name
        text_file(own / "brought", token)
        identities.append(BoundToken(Settings(name, plane.url, ca, token_days=1), own, own / "brought"))
    mark, began = len(plane.audit()), time.monotonic()
    before = spent(plane)
    with ThreadPoolExecutor(32) as pool:
        due = list(pool.map(lambda each: each.keep(time.time() + 600, Api(plane.url, each.session)), identities))
    took, cpu = time.monotonic() - began, spent(plane) - before
    renewed = [read_claims(folder / name / RENEWED) for name in names]
    with capsys.disabled():
        print(f"\n{FLEET} renewals in {took:.1f} s; API server: {1000 * cpu / FLEET:.1f} ms of CPU time each")  # noqa: T201
    assert [claims.node for claims in renewed] == names
    assert all(claims.expires - claims.issued == 86400 for claims in renewed)
    assert min(due) > 0.6 * 86400 - 1200 and max(due) < 0.7 * 86400
    assert {event["responseStatus"]["code"] for event in events(plane, mark)} == {201}


def read_claims(file: Path) -> Claims:
    """The claims of the token in a file."""
    return claims_of(file.read_text().split(".")[1])
