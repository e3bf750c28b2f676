"""The pictures of bench.tuning and bench.veth_tuning: what they show, by the text of the SVG."""

import io

from matplotlib import rc_context

from bench.tuning import WAYS, drawn
from bench.veth_tuning import drawn as drawn_rows
from bench.veth_tuning import rows


def test_each_way_is_drawn_with_its_medians_as_found_and_as_planned() -> None:
    results = {
        (way.name, as_found): [
            {"latency": 1000.0 * (number + 1) + 50 * as_found + more, "bw": 1e7 * (number + 1) - 1e6 * as_found}
            for more in (0, 9, 4)
        ]
        for number, way in enumerate(WAYS)
        for as_found in (True, False)
    }
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        drawn(results).savefig(text, format="svg")
    image = text.getvalue()
    for shown in ("as found", "as planned", *(way.name for way in WAYS)):
        assert f">{shown}</text>" in image
    for number in range(1, len(WAYS) + 1):
        for median in (1000 * number + 54, 1000 * number + 4, 10 * number - 1, 10 * number):
            assert f">{median}</text>" in image, median


def test_the_rows_of_veth_have_medians_and_ranges_and_are_drawn() -> None:
    rounds = [{"rate": rate, "p99": 70.0, "cpu": 12.0} for rate in (900.0, 1000.0, 1300.0)]
    runs = rows({("bridge", "as found"): rounds, ("bridge", "beside it"): [{"rate": 500.0, "p99": 80.0, "gap": 33.0}]})
    assert [run["rate"] for run in runs] == ["1000 (900 to 1300)", "500 (500 to 500)"]
    assert [(run["cpu"], run["gap"]) for run in runs] == [("12 (12 to 12)", ""), ("", "33 (33 to 33)")]
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        drawn_rows(runs).savefig(text, format="svg")
    for shown in ("bridge, as found", "bridge, beside it", "1000", "500", "70", "12", "33"):
        assert f">{shown}</text>" in text.getvalue()
