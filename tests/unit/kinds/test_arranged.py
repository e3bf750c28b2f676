"""The order of a kind's changes, and those that take one request."""

from agent.kinds.ethtool import CHANNELS, COALESCING
from agent.report.records import Change, Disruption, Numbers
from tests.sim.two_nics import PF0, PF1


def numbers(**values: int | None) -> Numbers:
    return Numbers.of(values)


def test_the_channels_of_a_netdev_are_set_in_one_request_with_those_that_are_restored() -> None:
    planned = Change("channels", PF0, "channels", numbers(combined=0), numbers(combined=2), Disruption.NONE)
    restored = [
        Change("channels", PF0, name, 2, 0, Disruption.LINK_FLAP, required=False, original=True)
        for name in ("rx", "tx")
    ]
    other = Change("channels", PF1, "combined", 2, 4, required=False, original=True)
    one, alone = CHANNELS.arranged([planned, *restored, other])
    assert (one.before, one.after) == (numbers(combined=0, rx=2, tx=2), numbers(combined=2, rx=0, tx=0))
    assert (one.field, one.disruption, one.required, one.original) == ("channels", Disruption.LINK_FLAP, True, False)
    assert (alone.target, alone.after, alone.required, alone.original) == (PF1, numbers(combined=4), False, True)


def test_a_number_that_the_device_cannot_have_now_does_not_hold_up_the_others() -> None:
    planned = Change("channels", PF0, "channels", numbers(rx=2), numbers(rx=4))
    restored = Change("channels", PF0, "combined", 2, 8, blocker="combined is 4 at most now", original=True)
    one, blocked = CHANNELS.arranged([planned, restored])
    assert (one.after, one.blocker) == (numbers(rx=4), "")
    assert (blocked.after, blocked.blocker) == (numbers(combined=8), "combined is 4 at most now")


def test_adaptive_mode_is_restored_before_or_after_the_numbers() -> None:
    changes = [
        Change("coalescing", PF0, name, before, after, original=True)
        for name, before, after in (("adaptive_rx", False, True), ("rx_usecs", 50, 8), ("adaptive_tx", True, False))
    ]
    assert [change.field for change in COALESCING.arranged(changes)] == ["adaptive_tx", "rx_usecs", "adaptive_rx"]
