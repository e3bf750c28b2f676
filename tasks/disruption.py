"""What the deploy may interrupt on a host now, by the policies and windows that bind the agent, too (docs/disruption.md).

What is not allowed now is deferred: the deploy of the host goes on without it, and names it at the end. That is no failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any
from weakref import WeakKeyDictionary

from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State
from pyinfra.context import host

from agent.report.disruption_policy import Allowed, allowed
from agent.report.printable import printable
from agent.report.records import Disruption
from agent.spec.nic import DisruptionPolicy, Nic
from agent.spec.node import NodeSpec
from agent.spec.strict import structure
from tasks.common.commands import warn
from tasks.common.data import host_data, this_host

ENGINE_RESTART = Disruption.REBIND
"""Running containers go on, and for a moment none can be started."""

DRIVER_RELOAD = Disruption.VF_RESET
"""For a moment the driver's devices are gone, those of its VFs, too."""

_deferred: WeakKeyDictionary[Host, dict[str, str]] = WeakKeyDictionary()


def why_not(level: Disruption, of_nics: bool) -> str:
    """Why the current host's inventory does not allow this level now; empty: it does, or it has no policy.

    :param of_nics: the policies of the NICs count, too, since they would be interrupted.
    """
    return next(filter(None, (_below(key, _now(policy), level) for key, policy in _policies(of_nics))), "")


def of_nic(spec: NodeSpec, nic: Nic, level: Disruption) -> tuple[Disruption, str]:
    """What the spec's policy allows now for a NIC alone, and why that is less than this level; empty: it is not."""
    key = "disruption" if nic.disruption is None else f"nics[{spec.nics.index(nic)}].disruption"
    may = _now(nic.disruption or spec.disruption)
    return may.level, _below(key, may, level)


def _now(policy: DisruptionPolicy) -> Allowed:
    return allowed(policy, None, None, datetime.now(timezone.utc))


def _below(key: str, may: Allowed, level: Disruption) -> str:
    return "" if may.level >= level else f"{key} allows {may.level} now, and this is {level}{may.until}"


def deferred(step: str, level: Disruption, of_nics: bool, hindrance: Callable[[], str] = str) -> bool:
    """For an operation: whether a step is not allowed now, so that it is left out. Then it is named, with the reason.

    :param hindrance: what else forbids a step that is allowed; empty: nothing.
    """
    why = why_not(level, of_nics) or hindrance()
    if why:
        defer(step, why)
    else:
        settle(step)
    return bool(why)


def settle(step: str) -> None:
    """Note that a step on the current host is not left out: it is made, or not needed any more."""
    here().pop(step, None)


def defer(step: str, why: str) -> None:
    """Note that a step on the current host is left out, and say so, unless that was just said."""
    steps = here()
    if steps.get(step) != why:
        warn(host, f"deferred: {step}: {why}")
    steps[step] = why


def forget() -> None:
    """Forget what is deferred on the current host: its operations run again, and judge it anew."""
    here().clear()


def is_given() -> bool:
    """Whether the current host's inventory has a policy."""
    return any(True for _ in _policies(of_nics=True))


def forced() -> bool:
    """Whether the current host's policy allows to disturb users."""
    return any(policy.force for _, policy in _policies(of_nics=False))


class Summary(BaseStateCallback):
    """Names at the end of the deploy what was deferred, and on which hosts."""

    def operation_end(self, state: State, op_hash: str) -> None:  # type: ignore[override]
        """The last operation has ended."""
        if op_hash == state.get_op_order()[-1]:  # type: ignore[no-untyped-call]
            for line in summary({each.name: _of(each) for each in state.inventory.iter_activated_hosts()}):
                logger.warning(printable(line))


def summary(by_host: Mapping[str, Mapping[str, str]]) -> list[str]:
    """One line for each step that was deferred for one reason, with its hosts."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for name, steps in by_host.items():
        for step, why in steps.items():
            hosts.setdefault((step, why), []).append(name)
    return [
        f"deferred on {len(names)} of {len(by_host)} hosts: {step}: {why}: {', '.join(sorted(names))}"
        for (step, why), names in sorted(hosts.items())
    ]


def here() -> dict[str, str]:
    """What is deferred on the current host: the reasons, by the steps."""
    return _of(this_host())


def _of(one: Host) -> dict[str, str]:
    return _deferred.setdefault(one, {})


def _policies(of_nics: bool) -> Iterator[tuple[str, DisruptionPolicy]]:
    """The policies that the inventory gives. The default allows whatever the deploy does, but for a reboot.

    Whether there are reboots the key `reboot` says, so without any policy that key alone counts.
    """
    data = host_data()
    given: list[tuple[str, Any]] = [("disruption", data.get("disruption"))]
    if of_nics:
        nics: Any = data.get("nics") or ()
        given += [(f"nics[{position}].disruption", nic.get("disruption")) for position, nic in enumerate(nics)]
    for key, value in given:
        if value is not None:
            yield key, structure(value, DisruptionPolicy, key)
