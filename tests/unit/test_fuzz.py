"""No input crashes a parser of foreign data: some made-up inputs for each, always the same. `make fuzz` tries more."""

import faulthandler

import pytest

from tests.fuzz import targets
from tests.fuzz.mutation import cases

SEED = 18
CASES = {"sysfs": 30, "facts": 2000}
USUALLY = 400
HANG_S = 300.0


@pytest.mark.parametrize("name", targets.names())
def test_nothing_but_documented_errors(name: str) -> None:
    target = targets.load(name)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        for data in cases(target.seeds(), SEED, CASES.get(name, USUALLY)):
            target.check(data)
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_the_same_seed_gives_the_same_cases() -> None:
    assert list(cases([b"abc"], 1, 50)) == list(cases([b"abc"], 1, 50)) != list(cases([b"abc"], 2, 50))
