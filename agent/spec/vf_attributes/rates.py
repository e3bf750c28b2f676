"""The transmit rates of a VF: the guaranteed one, and the highest. The kernel sets both together."""

from __future__ import annotations

import errno
from functools import partial
from typing import Any

from agent.spec.validators import Within
from agent.spec.vf_attributes import Refusal, Together, Values, VfAttribute, word


def _message(index: int, values: Values) -> tuple[str, Values]:
    return "IFLA_VF_RATE", {"vf": index, **values}


_TOGETHER = Together({"min_tx_rate": 0, "max_tx_rate": 0}, _message)


def _needs_maximum(vf: Any) -> str:
    if vf.min_tx_rate and vf.max_tx_rate is None:
        return "min_tx_rate needs max_tx_rate, which is not given; give it, too (0 is none)"
    if vf.min_tx_rate and vf.max_tx_rate and vf.min_tx_rate > vf.max_tx_rate:
        return f"min_tx_rate {vf.min_tx_rate} is above max_tx_rate {vf.max_tx_rate}; lower it"
    return ""


def _minimum_first(wanted: Any, reported: Any) -> bool:
    # Between the two writes, too, min_tx_rate must not exceed max_tx_rate (EINVAL).
    return bool(wanted.max_tx_rate) and wanted.max_tx_rate < reported.min_tx_rate


def _no_minimum(refusal: Refusal) -> tuple[int, str] | None:
    if refusal.errno != errno.EINVAL or not refusal.value:
        return None
    # igb, ixgbe, qede and others return EINVAL for any value but 0.
    rate = f"{refusal.value} Mbit/s"
    return errno.EOPNOTSUPP, f"the driver of {refusal.netdev} does not support min_tx_rate, or not as much as {rate}"


def _too_fast(refusal: Refusal) -> tuple[int, str] | None:
    if refusal.errno != errno.EINVAL:
        return None
    minimum = refusal.present["min_tx_rate"]
    if 0 < refusal.value < minimum:
        return errno.EINVAL, f"EINVAL: its min_tx_rate is {minimum}; set that as well"
    return errno.EINVAL, f"EINVAL: {refusal.netdev} has no link yet, or is slower than {refusal.value} Mbit/s"


def _shown(vf: Any) -> tuple[str, ...]:
    given = (("at least", vf.min_tx_rate), ("at most", vf.max_tx_rate))
    return tuple(f"{bound} {rate} Mbit/s" for bound, rate in given if rate)


_rate = partial(
    VfAttribute,
    type=int,
    unit="Mbit/s; 0 is none",
    validator=Within(0, 2**32 - 1, "Mbit/s (0 is none)"),
    netlink="IFLA_VF_RATE",
    unreported=0,
    together=_TOGETHER,
)
ATTRIBUTES = (
    _rate(
        name="max_tx_rate",
        meaning="the highest transmit rate of the VF",
        order=70,
        read=word(2),
        last=_minimum_first,
        explain=_too_fast,
        show=_shown,
    ),
    _rate(
        name="min_tx_rate",
        meaning="the transmit rate that the VF is guaranteed; needs `max_tx_rate`",
        order=80,
        check=_needs_maximum,
        read=word(1),
        explain=_no_minimum,
        show=lambda vf: (),
    ),
)
