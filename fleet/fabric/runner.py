"""Runs the tests on nodes, round by round. A failure on a node is a result, and does not end the run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeVar

from attrs import define, field, frozen

from fleet.fabric.collective import Collective, Group, groups, launcher, outcome
from fleet.fabric.ends import Ends
from fleet.fabric.journal import Journal
from fleet.fabric.launch import SSH, Keys, daemon, files_of_first, files_of_other
from fleet.fabric.results import FabricResult, failed, measured, messages
from fleet.fabric.schedule import Pair, Round
from fleet.fabric.stages import STAGES
from fleet.fabric.tests import ALL_REDUCE, TESTS, FabricSettings, client, server
from fleet.fabric.verdict import Verdict, good_ends, lost_nodes, verdict

PORT = 18515
"""perftest's default port. The first NIC of a node uses it, the others the next ones."""

ANSWER = 45
"""How many seconds longer than its tests a node may take to answer."""

LAUNCH = 30
"""Seconds for a group's programs to be started on its nodes."""

Request = Mapping[str, Any]
"""What a node is to do in a round, as templates/fabric.py reads it."""

_T = TypeVar("_T")


class Nodes(Protocol):
    """The connection to all nodes."""

    @property
    def at_once(self) -> int:
        """How many nodes are asked at the same time. The others wait for their turn."""
        ...

    def ask(self, requests: Mapping[str, Request], timeout: float) -> Mapping[str, Mapping[str, Any] | None]:
        """Ask several nodes at the same time; the answer of each, or None if it gave none in time."""
        ...


@frozen
class Job:
    """A running test: its pair, and the name that the nodes know it by."""

    server: str
    client: str
    port: int

    @property
    def id(self) -> str:
        """The name in requests and answers."""
        return f"{self.server} {self.client}"

    @property
    def ends(self) -> Pair:
        """Both ends."""
        return self.server, self.client


@define
class Runner:
    """A run. ``tell`` is called with a line for people at each round."""

    ends: Ends
    settings: FabricSettings
    nodes: Nodes
    journal: Journal
    tell: Callable[[str], None]
    _lost: set[str] = field(init=False)
    _ports: dict[str, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._lost = lost_nodes(self.journal.results, self.journal.collectives)
        nics: Counter[str] = Counter()
        self._ports = {}
        for name, end in self.ends.items():
            self._ports[name] = PORT + nics[end.node]
            nics[end.node] += 1

    def run(self) -> Verdict:
        """Do what is left of all stages; each result is on disk before the next round begins."""
        done = {result.key for result in self.journal.results}
        for name, rounds_of in STAGES:
            rounds = rounds_of(self.ends, self.settings, self.journal.results)
            for each in rounds:
                left = [pair for pair in each.pairs if (each.stage, each.number, *pair) not in done]
                if left:
                    self.tell(f"{name}: round {each.number + 1} of {len(rounds)}: {each.test}, {len(left)} tests")
                for pairs in self._portions(left):
                    self.journal.add(self._round(each, pairs))
        if ALL_REDUCE in self.settings.tests:
            self._collectives()
        self.journal.finish()
        return verdict(self.ends, self.journal.results, True, self.journal.collectives)

    def _collectives(self) -> None:
        """Do what is left of the collective stage: one rail after the other, since the NICs of a node may share its GPUs."""
        planned = groups(self.ends, good_ends(self.ends, self.journal.results), self.settings.seed)
        done = {each.group.number for each in self.journal.collectives}
        if not planned:
            self.tell(
                f"{ALL_REDUCE}: left out, since no two nodes with good NICs have mpirun and a program to measure with"
            )
        for rail, members in groupby(planned, lambda group: group.rail):
            left = [group for group in members if group.number not in done]
            if left:
                self.tell(f"{ALL_REDUCE}: rail {rail}: {len(left)} groups")
            for portion in self._portions(left):
                self.journal.add((), self._reduce(portion))

    def _reduce(self, portion: Sequence[Group]) -> list[Collective]:
        """The results of some groups at the same time, in their order."""
        keys = {group.number: Keys.make() for group in portion}
        others = {self._node(name) for group in portion for name in group.ends[1:]}
        lasts = self._turns(others, [self._node(group.ends[0]) for group in portion]) * (self._limit + LAUNCH + ANSWER)
        daemons = [job for group in portion for job in self._daemons(group, keys[group.number], lasts)]
        answers = self._send("serve", daemons)
        results: dict[int, Collective] = {}
        for group in portion:
            why = [f"{name}: {text}" for name in group.ends[1:] if (text := answers.get(name))]
            if why and not self._gone(group.ends):
                results[group.number] = Collective(group, None, "no-server", "; ".join(why))
        up = [group for group in portion if group.number not in results and not self._gone(group.ends)]
        answers = self._send("measure", [self._first(group, keys[group.number]) for group in up])
        there = [name for group in portion for name in group.ends if self._node(name) not in self._lost]
        self._send("collect", [self._job(name, ()) for name in there])
        for group in portion:
            if gone := [self._node(name) for name in group.ends if self._node(name) in self._lost]:
                results[group.number] = Collective(group, None, "lost", gone[0])
            elif group.number not in results:
                code, output = answers[group.ends[0]]
                results[group.number] = outcome(group, self.settings.collective_size, int(code), str(output))
        return [results[group.number] for group in portion]

    def _daemons(self, group: Group, keys: Keys, seconds: int) -> Iterator[dict[str, Any]]:
        first = self.ends[group.ends[0]]
        for name in group.ends[1:] if not self._gone(group.ends) else ():
            files = files_of_other(keys, first, self.ends[name], self._ports[name])
            yield {**self._job(name, daemon()), "seconds": seconds, "files": files}

    def _first(self, group: Group, keys: Keys) -> dict[str, Any]:
        words = launcher(group, self.ends, self.settings.collective_size, SSH)
        others = [(self.ends[name], self._ports[name]) for name in group.ends[1:]]
        return {**self._job(group.ends[0], words), "files": files_of_first(keys, others)}

    def _job(self, end: str, argv: Sequence[str]) -> dict[str, Any]:
        words = {"id": end, "argv": argv, "port": self._ports[end], "seconds": self._limit + LAUNCH}
        return {**words, "rdma_cm": False, "ends": False}

    def _send(self, do: str, jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self._answers(do, [(self._node(job["id"]), job) for job in jobs], self._limit + LAUNCH + ANSWER)

    @property
    def _limit(self) -> int:
        """Seconds that a client may take."""
        return self.settings.seconds + self.settings.grace

    def _turns(self, *asked: Collection[str]) -> int:
        """How many batches of at most ``at_once`` nodes it takes to ask all of these, one collection after the other."""
        return sum(-(-len(set(nodes)) // self.nodes.at_once) for nodes in asked)

    def _portions(self, tests: Sequence[_T]) -> Iterator[Sequence[_T]]:
        most = self.settings.at_once or max(1, len(tests))
        for start in range(0, len(tests), most):
            yield tests[start : start + most]

    def _round(self, made: Round, pairs: Sequence[Pair]) -> list[FabricResult]:
        """The results of some tests of a round, in the order of the pairs."""
        results: dict[Pair, FabricResult] = {}
        jobs = [Job(one, other, self._ports[one]) for one, other in pairs]
        answers = self._ask("serve", made, [job for job in jobs if not self._gone(job.ends)])
        for job in jobs:
            if not self._gone(job.ends) and (text := answers.get(job.id)):
                results[job.server, job.client] = failed(made, job.server, job.client, "no-server", messages(text))
        up = [job for job in jobs if answers.get(job.id) == "" and not self._gone(job.ends)]
        clients = self._ask("measure", made, up)
        measured_well = {name for name, (code, _) in clients.items() if code == 0}
        there = [job for job in up if self._node(job.server) not in self._lost]
        servers = self._ask("collect", made, there, measured_well)
        for job in up:
            if not self._gone(job.ends):
                results[job.server, job.client] = self._result(made, job, clients[job.id], servers[job.id])
        for job in jobs:
            if self._gone(job.ends):
                gone = next(node for node in map(self._node, job.ends) if node in self._lost)
                results[job.server, job.client] = failed(made, job.server, job.client, "lost", gone)
        return [results[pair] for pair in pairs]

    def _ask(self, do: str, made: Round, jobs: Sequence[Job], ending: Collection[str] = frozenset()) -> dict[str, Any]:
        """Ask each node for its part of the round; the answers by job. A node that does not answer is not asked again.

        :param ending: the jobs whose servers end by themselves, since their clients have ended well.
        """
        asked_of: list[tuple[str, dict[str, Any]]] = []
        limit = self._limit
        test = TESTS[made.test]
        servers, clients = ({self._node(job.ends[place]) for job in jobs} for place in (0, 1))
        # A server waits until all others are started, and until it is its client's turn.
        lasts = self._turns(servers, clients) * (limit + ANSWER)
        for job in jobs:
            one, other = self.ends[job.server], self.ends[job.client]
            asked, seconds = (one, lasts) if do != "measure" else (other, limit)
            given = (job.port, self.settings)
            argv = server(test, one, *given) if do != "measure" else client(test, other, one, *given)
            words = {"id": job.id, "argv": argv, "port": job.port, "seconds": seconds, "rdma_cm": test.rdma_cm}
            asked_of.append((asked.node, {**words, "ends": job.id in ending}))
        return self._answers(do, asked_of, limit + ANSWER)

    def _answers(self, do: str, jobs: Sequence[tuple[str, dict[str, Any]]], timeout: float) -> dict[str, Any]:
        """Ask nodes for jobs; the answers by job. A node that does not answer is lost from now on."""
        if not jobs:
            return {}
        by_node: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for node, job in jobs:
            by_node[node].append(job)
        requests = {node: {"do": do, "jobs": each} for node, each in sorted(by_node.items())}
        answers = self.nodes.ask(requests, timeout)
        collected: dict[str, Any] = {}
        for node, asked_jobs in by_node.items():
            # A node may answer anything. Only its answers about its own jobs count.
            answer = answers.get(node) or {}
            valid = {each["id"]: answer[each["id"]] for each in asked_jobs if _is_answer(do, answer.get(each["id"]))}
            if len(valid) < len(asked_jobs):
                self._lost.add(node)
                self.tell(f"{node} does not answer; it is left out from now on")
            else:
                collected |= valid
        return collected

    def _result(self, made: Round, job: Job, of_client: Sequence[Any], of_server: Sequence[Any]) -> FabricResult:
        result = measured(made, job.server, job.client, int(of_client[0]), str(of_client[1]), self.settings)
        code, output = of_server
        if not result.fault and code != 0:
            why = "it did not end" if code is None else f"exit status {code}"
            return failed(made, job.server, job.client, "server", messages(str(output)) or why)
        return result

    def _gone(self, ends: Sequence[str]) -> bool:
        """Whether one of the ends' nodes is lost."""
        return not self._lost.isdisjoint(map(self._node, ends))

    def _node(self, end: str) -> str:
        return self.ends[end].node


def _is_answer(do: str, answer: Any) -> bool:
    """Whether this is what templates/fabric.py answers: a text, or an exit status and a text."""
    match answer:
        case str():
            return do == "serve"
        case [int(), str()]:
            return do in ("measure", "collect")
        case [None, str()]:
            return do == "collect"
    return False
