"""The picture of bench.tuning: what it shows, by the text of its SVG."""

import io

from matplotlib import rc_context

from bench.tuning import WAYS, drawn


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
