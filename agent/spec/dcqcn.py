"""The parameters of RoCE congestion control (DCQCN) in a spec."""

from __future__ import annotations

from attrs import field, fields, frozen

from agent.spec.validators import Within

_ANY = Within(0, 2**32 - 1, "(32 bits)")
_FRACTION = Within(0, 1023, "(1024ths)")
_MICROSECONDS = Within(0, 2**32 - 1, "microseconds")
_MEGABITS = Within(0, 2**32 - 1, "Mbit/s")


@frozen
class Dcqcn:
    """The parameters of DCQCN, by the names that NVIDIA's documents give them ("DCQCN CC Parameters"); None leaves one alone.

    Rates are in Mbit/s, times in microseconds, ``dce_tcp_g`` and ``initial_alpha_value`` in 1024ths, ``rpg_min_dec_fac`` in
    percent. Where a limit is not known, the firmware refuses what is beyond it.
    """

    clamp_tgt_rate: bool | None = None
    clamp_tgt_rate_after_time_inc: bool | None = None
    rpg_time_reset: int | None = field(default=None, validator=_MICROSECONDS)
    rpg_byte_reset: int | None = field(default=None, validator=_ANY)
    rpg_threshold: int | None = field(default=None, validator=_ANY)
    rpg_max_rate: int | None = field(default=None, validator=_MEGABITS)
    rpg_ai_rate: int | None = field(default=None, validator=_MEGABITS)
    rpg_hai_rate: int | None = field(default=None, validator=_MEGABITS)
    rpg_gd: int | None = field(default=None, validator=_ANY)
    rpg_min_dec_fac: int | None = field(default=None, validator=Within(0, 100, "percent"))
    rpg_min_rate: int | None = field(default=None, validator=_MEGABITS)
    rate_to_set_on_first_cnp: int | None = field(default=None, validator=_MEGABITS)
    dce_tcp_g: int | None = field(default=None, validator=_FRACTION)
    dce_tcp_rtt: int | None = field(default=None, validator=_MICROSECONDS)
    rate_reduce_monitor_period: int | None = field(default=None, validator=_MICROSECONDS)
    initial_alpha_value: int | None = field(default=None, validator=_FRACTION)
    min_time_between_cnps: int | None = field(default=None, validator=_MICROSECONDS)
    cnp_802p_prio: int | None = field(default=None, validator=Within(0, 7, "(VLAN priority)"))


DCQCN_PARAMETERS = tuple(parameter.name for parameter in fields(Dcqcn))
