"""Runs the tests on nodes, round by round. A failure on a node is a result, and never ends the run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field, frozen

from fleet.fabric.ends import Ends
from fleet.fabric.journal import Journal
from fleet.fabric.results import Result, failed, measured, messages
from fleet.fabric.schedule import Pair, Round
from fleet.fabric.stages import STAGES, FabricSettings
from fleet.fabric.tests import TESTS, client, server
from fleet.fabric.verdict import Verdict, verdict

PORT = 18515
"""perftest's default port. The NICs of a node use this one and those above it."""

ANSWER = 45
"""How many seconds longer than its tests a node may take to answer."""

Request = Mapping[str, Any]
"""A node's part of a round, as templates/fabric.py reads it."""


class Nodes(Protocol):
    """The connection to all nodes."""

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


@define
class Runner:
    """A run. ``tell`` is called with a line for people at each round."""

    ends: Ends
    settings: FabricSettings
    nodes: Nodes
    journal: Journal
    tell: Callable[[str], None]
    _results: list[Result] = field(init=False)
    _lost: set[str] = field(init=False)
    _ports: dict[str, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._results = list(self.journal.results)
        self._lost = {result.text for result in self._results if result.fault == "lost"}
        nics: Counter[str] = Counter()
        self._ports = {}
        for name, end in self.ends.items():
            self._ports[name] = PORT + nics[end.node]
            nics[end.node] += 1

    def run(self) -> Verdict:
        """Do what is left of all stages; each result is on disk before the next round begins."""
        done = {result.key for result in self._results}
        for name, rounds_of in STAGES:
            rounds = rounds_of(self.ends, self.settings, self._results)
            for each in rounds:
                left = [pair for pair in each.pairs if (each.stage, each.number, *pair) not in done]
                if left:
                    self.tell(f"{name}: round {each.number + 1} of {len(rounds)}: {each.test}, {len(left)} tests")
                for pairs in self._portions(left):
                    made = self._round(each, pairs)
                    self.journal.add(made)
                    self._results += made
        self.journal.finish()
        return verdict(self.ends, self._results, True)

    def _portions(self, pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
        most = self.settings.at_once or max(1, len(pairs))
        for start in range(0, len(pairs), most):
            yield pairs[start : start + most]

    def _round(self, made: Round, pairs: Sequence[Pair]) -> list[Result]:
        """The results of some tests of a round, in the order of the pairs."""
        results: dict[Pair, Result] = {}
        jobs = [Job(one, other, self._ports[one]) for one, other in pairs]
        said = self._ask("serve", made, [job for job in jobs if not self._gone(job)])
        for job in jobs:
            if not self._gone(job) and (text := said.get(job.id)):
                results[job.server, job.client] = failed(made, job.server, job.client, "no-server", messages(text))
        up = [job for job in jobs if said.get(job.id) == "" and not self._gone(job)]
        clients = self._ask("measure", made, up)
        measured_well = {name for name, (code, _) in clients.items() if code == 0}
        there = [job for job in up if self._node(job.server) not in self._lost]
        servers = self._ask("collect", made, there, measured_well)
        for job in up:
            if not self._gone(job):
                results[job.server, job.client] = _result(made, job, clients[job.id], servers[job.id])
        for job in jobs:
            if self._gone(job):
                gone = next(node for node in map(self._node, (job.server, job.client)) if node in self._lost)
                results[job.server, job.client] = failed(made, job.server, job.client, "lost", gone)
        return [results[pair] for pair in pairs]

    def _ask(self, do: str, made: Round, jobs: Sequence[Job], ending: Collection[str] = frozenset()) -> dict[str, Any]:
        """Ask each node for its part of the round; the answers by job. A node that does not answer is not asked again.

        :param ending: the jobs whose servers end by themselves, since their clients have ended well.
        """
        by_node: dict[str, list[dict[str, Any]]] = defaultdict(list)
        limit = self.settings.seconds + self.settings.grace
        test = TESTS[made.test]
        for job in jobs:
            one, other = self.ends[job.server], self.ends[job.client]
            asked, seconds = (one, 2 * limit + ANSWER) if do != "measure" else (other, limit)
            settings = (job.port, self.settings.seconds, self.settings.gpu_memory)
            argv = server(test, one, *settings) if do != "measure" else client(test, other, one, *settings)
            words = {"id": job.id, "argv": argv, "port": job.port, "seconds": seconds, "rdma_cm": test.rdma_cm}
            by_node[asked.node].append({**words, "ends": job.id in ending})
        if not by_node:
            return {}
        requests = {node: {"do": do, "jobs": each} for node, each in sorted(by_node.items())}
        answers = self.nodes.ask(requests, limit + ANSWER)
        said: dict[str, Any] = {}
        for node, asked_jobs in by_node.items():
            answer = answers.get(node)
            if answer is None or any(each["id"] not in answer for each in asked_jobs):
                self._lost.add(node)
                self.tell(f"{node} does not answer; it is left out from now on")
            else:
                said |= answer
        return said

    def _gone(self, job: Job) -> bool:
        return not self._lost.isdisjoint((self._node(job.server), self._node(job.client)))

    def _node(self, end: str) -> str:
        return self.ends[end].node


def _result(made: Round, job: Job, of_client: Sequence[Any], of_server: Sequence[Any]) -> Result:
    result = measured(made, job.server, job.client, int(of_client[0]), str(of_client[1]))
    code, output = of_server
    if not result.fault and code != 0:
        why = "it did not end" if code is None else f"exit status {code}"
        return failed(made, job.server, job.client, "server", messages(str(output)) or why)
    return result
