"""Random trials of originals. The command in :mod:`tests.sim.engine.restoring_trials` makes more of them."""

import pytest

from tests.sim.engine.restoring_trials import differing


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_each_value_is_as_before_once_the_spec_is_empty(seed: int) -> None:
    wrong, told = differing(seed)
    assert not wrong, "\n".join([*told, *wrong])
