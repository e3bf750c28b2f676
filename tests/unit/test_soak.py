"""The soak of a node, `python -m tests.soak`, without a node."""

import subprocess

import pytest
from attrs import evolve
from click.testing import CliRunner

from tests.soak import GROWTH, Drift, Row, drift, drifts, main, replaced, summary, wrong

BOTH = ["iperf3", "ib_write_bw"]
ROUND = [Row("ip link set ens1f0v0 down", took, 60.0) for took in (1.0, 3.0)]
END = Row("ip link set ens1f0v1 down", 2.0, 60.0, memory=50_000, descriptors=30)


def test_each_round_breaks_every_value_once_in_an_order_of_its_own() -> None:
    count = len(drifts())
    first, second = ([drift(number) for number in range(start, start + count)] for start in (0, count))
    assert sorted(map(str, first)) == sorted(map(str, second)) == sorted(map(str, drifts()))
    assert first != second
    assert [drift(number) for number in range(count)] == first


@pytest.mark.parametrize("one", drifts(), ids=lambda one: one.command)
def test_each_command_is_valid_shell(one: Drift) -> None:
    for script in (one.command, one.repaired):
        assert subprocess.run(["sh", "-n", "-c", script], capture_output=True, check=False).returncode == 0, script


def test_a_soak_in_which_nothing_grows_is_good() -> None:
    assert wrong([*ROUND, END, *ROUND, END], BOTH) == []


@pytest.mark.parametrize("what", sorted(GROWTH))
def test_a_round_after_which_the_agent_is_larger_than_after_the_first_is_wrong(what: str) -> None:
    larger = evolve(END, **{what: getattr(END, what) + GROWTH[what] + 1})
    assert wrong([*ROUND, END, *ROUND, larger, *ROUND, END], BOTH) == [
        f"{what}: {getattr(END, what)} after the first round, then {getattr(larger, what)}"
    ]


def test_load_that_never_ended_well_is_wrong() -> None:
    assert wrong([*ROUND, END], ["iperf3"]) == ["no run of ib_write_bw ended well"]


def test_a_worker_that_was_replaced_is_wrong() -> None:
    message = "the worker has made no call for 1171 s; it is replaced"
    assert replaced(f"pass (event): 1 applied; ready\n{message}\n") == [message]


def test_the_summary_counts_drifts_and_loads() -> None:
    line = summary([*ROUND, END], [*BOTH, "iperf3"])
    assert "0.05 h, 3 drifts" in line
    assert "median 2.0, most 3.0" in line
    assert "2 of iperf3, 1 of ib_write_bw" in line


@pytest.mark.parametrize("options", [("--hours", "0"), ("--pace", "-1")])
def test_bad_times_are_refused(options: tuple[str, str]) -> None:
    assert CliRunner().invoke(main, options).exit_code == 2
