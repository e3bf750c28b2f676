"""What bench.tuning and bench.veth_tuning measure and show."""

import inspect
import io
import json
import subprocess
import sys

from matplotlib import rc_context

from bench import exchange
from bench.comparison import drawn, rows
from bench.veth_tuning import COLUMNS


def test_the_rows_have_medians_and_ranges_and_are_drawn() -> None:
    rounds = [{"rate": rate, "p99": 70.0, "cpu": 12.0} for rate in (900.0, 1000.0, 1300.0)]
    results = {("bridge", "as found"): rounds, ("bridge", "beside it"): [{"rate": 500.0, "p99": 80.0, "gap": 33.0}]}
    runs = rows(results, COLUMNS)
    assert [run["rate"] for run in runs] == ["1000 (900 to 1300)", "500 (500 to 500)"]
    assert [(run["cpu"], run["gap"]) for run in runs] == [("12 (12 to 12)", ""), ("", "33 (33 to 33)")]
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        drawn(runs, COLUMNS).savefig(text, format="svg")
    for shown in ("bridge, as found", "bridge, beside it", "1000", "500", "70", "12", "33"):
        assert f">{shown}</text>" in text.getvalue()


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
