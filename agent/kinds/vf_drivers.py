"""Observer: which VFs have a driver, of the PFs whose driver resets a VF to set one of its attributes."""

from __future__ import annotations

from collections.abc import Mapping

from agent.driver_families import family_of
from agent.hardware.functions import driver
from agent.machine import Machine
from agent.state.scope import Scope, functions_in_scope
from agent.state.wanted import Wanted

NAME = "vf_drivers"
AFTER = ("vfs",)


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, bool]]:
    """Whether each VF has a driver, by target. A PF whose driver resets no VF is left out."""
    return {
        address: {
            target: driver(machine.files, vf) is not None for target, vf in functions.items() if target != address
        }
        for address, functions in functions_in_scope(machine.files, want, scope).items()
        if family_of(want.nics[address].function.driver).vf_resets
    }
