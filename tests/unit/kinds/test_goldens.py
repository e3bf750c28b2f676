"""Golden files of plans; tests/unit/kinds/golden.py describes them and writes them again."""

from pathlib import Path

import pytest

from tests.unit.kinds.golden import cases, plan_text


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_plan_is_the_golden_one_to_the_byte(case: Path) -> None:
    assert plan_text(case) == (case / "plan.json").read_text()


def test_no_golden_plan_is_empty() -> None:
    assert len(cases()) >= 8
    assert all('"kind"' in (case / "plan.json").read_text() for case in cases())
