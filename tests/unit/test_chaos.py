"""The trials of `python -m tests.chaos`, without a node."""

import http.client
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import pytest

from lab.cluster.certificates import Authority
from lab.instance import free_port
from lab.node import wait
from tests.chaos import bad_api_server
from tests.chaos.__main__ import ALL, again, pick
from tests.chaos.faults import FAULTS, Fault, trials
from tests.chaos.smallest import smallest
from tests.chaos.trial import OFTEN, of_journal


def test_the_same_seed_makes_the_same_trials() -> None:
    assert list(trials(7, 200, FAULTS)) == list(trials(7, 200, FAULTS)) != list(trials(8, 200, FAULTS))


def test_each_fault_is_tried_before_any_comes_again() -> None:
    firsts = [faults[0].name for faults in trials(1, len(FAULTS), FAULTS)]
    assert sorted(firsts) == sorted(fault.name for fault in FAULTS)
    assert len(set(firsts)) == len(firsts)


def test_a_fault_of_the_host_is_alone() -> None:
    pairs = [faults for faults in trials(1, 500, FAULTS) if len(faults) == 2]
    assert pairs
    assert all(fault.host is None for fault in chain.from_iterable(pairs))


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_each_script_is_valid_shell(fault: Fault) -> None:
    for script in (fault.begin, fault.end, fault.needs):
        assert subprocess.run(["sh", "-n", "-c", script], capture_output=True, check=False).returncode == 0, script


def test_each_fault_has_its_name() -> None:
    assert len({fault.name for fault in ALL}) == len(ALL)


@pytest.mark.parametrize("needed", [[7], [0, 7], [3, 4, 7], [1, 2, 5, 6, 7], list(range(8))])
def test_what_a_failure_does_not_need_is_dropped(needed: list[int]) -> None:
    tried = []

    def fails(steps: Sequence[int]) -> bool:
        tried.append(steps)
        return set(needed) <= set(steps)

    assert smallest(range(8), fails, 100) == needed
    assert all(steps[-1] == 7 for steps in tried)


def test_the_search_for_fewer_faults_ends_after_its_limit_with_the_best_set() -> None:
    calls = []

    def fails(steps: Sequence[int]) -> bool:
        calls.append(steps)
        return {3, 63} <= set(steps)

    kept = smallest(range(64), fails, 5)
    assert len(calls) == 5
    assert {3, 63} <= set(kept)
    assert smallest([9], fails, 5) == [9]


def test_the_command_that_is_printed_picks_the_same_trials() -> None:
    planned = list(trials(3, 40, FAULTS))
    number = next(n for n, faults in enumerate(planned) if len(faults) == 2)
    needed = [(0, planned[0]), (number, planned[number][:1])]
    command = again(3, (), needed, dict(enumerate(planned)))
    left_out = planned[number][1].name
    assert f"--trial 1 --trial {number + 1}" in command
    assert left_out in command
    assert pick(planned, [1, number + 1], [left_out]) == needed


def test_a_traceback_or_a_flood_in_the_journal_is_wrong() -> None:
    assert of_journal("all is well\n" * OFTEN) == []
    assert of_journal("Traceback (most recent call last):\n") == ["the journal has 'Traceback'"]
    [flood] = of_journal("".join(f"gone for {number} s\n" for number in range(OFTEN + 1)))
    assert flood == f"the journal has {OFTEN + 1} times: gone for N s"


@contextmanager
def serving(folder: Path, how: str) -> Iterator[http.client.HTTPSConnection]:
    authority = Authority(folder)
    authority.create()
    authority.server("kube-apiserver", ("127.0.0.1",))
    port = free_port()
    program = [sys.executable, bad_api_server.__file__, str(port), str(folder / "server-kube-apiserver.crt"), how]
    context = ssl.create_default_context(cafile=str(authority.pair.certificate))

    def answers() -> bool:
        with suppress(OSError):
            connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=5)
            connection.connect()
            connection.close()
            return True
        return False

    with subprocess.Popen(program) as server:
        try:
            wait(answers, 60, "the server")
            yield http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=5)
        finally:
            server.kill()


@pytest.mark.parametrize(("how", "status"), [("429", 429), ("500", 500), ("slow", 503), ("garbage", 200)])
def test_the_bad_api_server_gives_the_chosen_answer(tmp_path: Path, how: str, status: int) -> None:
    with serving(tmp_path, how) as connection:
        connection.request("PATCH", "/api/v1/nodes/n/status", body="{}")
        answer = connection.getresponse()
        assert answer.status == status
        assert (b"Status" in answer.read()) is (how != "garbage")


def test_the_bad_api_server_cuts_connections_or_does_not_answer(tmp_path: Path) -> None:
    with serving(tmp_path, "cut") as connection:
        connection.request("GET", "/")
        with pytest.raises(http.client.IncompleteRead):
            connection.getresponse().read()
    with serving(tmp_path, "silence") as connection:
        connection.request("GET", "/")
        with pytest.raises(TimeoutError):
            connection.getresponse()
