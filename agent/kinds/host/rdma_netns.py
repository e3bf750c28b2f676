"""Whether every network namespace sees all RDMA devices, or each its own (`rdma system`, ib_core's netns_mode)."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from agent.kinds import Reading
from agent.machine import Machine
from agent.report.records import HOST, Change
from agent.state.scope import Scope, host_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "rdma_netns"

FIELD = "netns_mode"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, str | None]]:
    """The mode, if the spec gives one; None without an RDMA subsystem."""
    asked = want.spec.rdma.netns_mode is not None and host_in_scope(scope)
    return {HOST: {FIELD: machine.rdma.netns_mode()}} if asked else {}


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """One change if the mode differs. It disturbs nobody: the kernel refuses it while other network namespaces exist."""
    after = want.spec.rdma.netns_mode
    before: str | None = have[NAME].get(HOST, {}).get(FIELD)
    return [] if after is None or before == after else [Change(NAME, HOST, FIELD, before, after)]


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """The mode as it is now."""
    return Reading(machine.rdma.netns_mode()) if want.spec.rdma.netns_mode is None else None


def apply(machine: Machine, change: Change) -> None:
    """Set the mode. If the kernel refuses now, the error names the module parameter that sets it at the next boot."""
    mode = str(change.after)
    try:
        machine.rdma.set_netns_mode(mode)
    except OSError as error:
        lasting = f'kernel_module_options {{"ib_core": {{"netns_mode": {mode == "shared"}}}}}, then reboot'
        if error.errno == errno.EBUSY:
            message = (
                "EBUSY: the kernel changes it only while there is no network namespace but the host's (containers and "
                f"services with PrivateNetwork have some); to have it from the boot on: {lasting}"
            )
            raise OSError(errno.EBUSY, message) from error
        if error.errno in (errno.EPROTONOSUPPORT, errno.ECONNREFUSED):
            raise OSError(
                error.errno, "there is no RDMA subsystem; load ib_core (kernel_modules: ib_uverbs)"
            ) from error
        raise
