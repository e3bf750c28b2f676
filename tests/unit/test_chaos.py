"""The trials of `python -m tests.chaos`, without a node."""

import subprocess
from itertools import chain

import pytest

from tests.chaos.faults import FAULTS, Fault, trials


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


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_script_is_valid_shell(fault: Fault) -> None:
    for script in (fault.begin, fault.end):
        assert subprocess.run(["sh", "-n", "-c", script], capture_output=True, check=False).returncode == 0, script
