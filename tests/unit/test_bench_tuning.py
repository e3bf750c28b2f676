"""What bench.tuning and bench.veth_tuning measure and show."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import click
import pytest
from attrs import field, frozen

from bench import exchange
from bench.comparison import rows
from bench.tuning import PATHS, SETTINGS, End, PacketPath, Setting, measure
from lab import LabError


def test_the_rows_have_medians_and_ranges() -> None:
    rounds = [{"rate": rate, "p99": 70.0, "cpu": 12.0} for rate in (900.0, 1000.0, 1300.0)]
    results = {("bridge", "as found"): rounds, ("bridge", "beside it"): [{"rate": 500.0, "p99": 80.0, "gap": 33.0}]}
    runs = rows(results)
    assert [run["rate"] for run in runs] == ["1000 (900 to 1300)", "500 (500 to 500)"]
    assert [(run["cpu"], run["gap"]) for run in runs] == [("12 (12 to 12)", ""), ("", "33 (33 to 33)")]


def test_both_ends_run_from_the_text_of_the_module_alone() -> None:
    ends = [sys.executable, "-I", "-c", inspect.getsource(exchange)]
    address = "127.23.0.1"
    with subprocess.Popen([*ends, "answer", address]) as server:
        try:
            for _ in range(100):
                asked = subprocess.run([*ends, "request", address, "0.2"], capture_output=True, text=True, check=False)
                if "ConnectionRefusedError" not in asked.stderr:
                    break
            measured = json.loads(asked.stdout)
        finally:
            server.kill()
    assert measured.keys() == {"rate", "p99", "cpu"}
    assert measured["rate"] > 0
    assert measured["p99"] > 0


def test_the_program_that_spins_runs_from_the_text_of_the_module_and_says_how_long_it_stopped() -> None:
    words = [sys.executable, "-I", "-c", inspect.getsource(exchange), "spin", "0.2"]
    stops = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    assert stops["gap"] > 0


@frozen
class Checked:
    """A host that runs no script. It checks that each is one, and answers those that ask; one with the text ``fails`` fails."""

    fails: str = "\0"
    scripts: list[str] = field(factory=list)

    def run(
        self, argv: Sequence[str], timeout: float = 60.0, *, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        *_, script = argv
        checked = subprocess.run(["sh", "-n", "-c", script], capture_output=True, text=True, check=False)
        assert not checked.stderr, script
        self.scripts.append(script)
        if self.fails in script:
            raise LabError("it failed")
        answers = {
            "msi_irqs/*; do cat": "3\n",
            "nproc --all": "4\n",
            " spin 5": '{"gap": 7.0}\n',
            " request 10.99.0.1 5": '{"rate": 900.0, "p99": 70.0, "cpu": 12.0}\n',
        }
        return subprocess.CompletedProcess(
            argv, 0, "".join(text for asks, text in answers.items() if asks in script), ""
        )


def on(client: Checked, path: PacketPath, setting: Setting) -> dict[str, float]:
    ends = End(Checked(), "ens1f0", "ens1f0v0", "10.99.0.1"), End(client, "ens1f0", "ens1f0v0", "10.99.0.2")
    return measure(ends, path, setting, 5)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_every_setting_is_measured_on_every_path(path: PacketPath, setting: Setting) -> None:
    client = Checked()
    assert on(client, path, setting).keys() == {"rate", "p99", "gap" if setting.spin else "cpu"}
    (asks,) = [script for script in client.scripts if " request 10.99.0.1 5" in script]
    assert ("taskset -c 3 python3" in asks and "taskset -c 0,1,2 " in asks) == setting.spin
    assert not any("{{" in script or "}}" in script for script in client.scripts)


MADE, REMOVED = "mkdir /sys/fs/cgroup/tuning;", "rmdir /sys/fs/cgroup/tuning "
PLACED, STARTED = "trackbed apply", "systemctl start trackbed"


@pytest.mark.parametrize(
    ("fails", "placed"),
    [("\0", [PLACED]), (" request 10.99.0.1 5", [PLACED]), ("cpuset.cpus.partition", [])],
    ids=["nothing", "the requests", "the partition"],
)
def test_the_owner_is_there_while_interrupts_are_placed(fails: str, placed: list[str]) -> None:
    client, (owned,) = Checked(fails), [setting for setting in SETTINGS if setting.owned]
    with suppress(click.ClickException):
        on(client, PATHS[0], owned)
    steps = re.findall("|".join((MADE, REMOVED, PLACED, STARTED)), "".join(client.scripts))
    assert steps == [PLACED, MADE, *placed, REMOVED, STARTED]
