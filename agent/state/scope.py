"""Scopes: which devices and functions to read, as named by kernel events or by the changes that a pass wrote."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

from agent.hardware.functions import pci_of, targets
from agent.machine import Files
from agent.report.records import HOST
from agent.report.target import device_of, is_vf
from agent.state.wanted import Wanted

Scope = frozenset[str] | None
"""What to read; None is everything. A PF's PCI address includes its VFs; :func:`own` names it alone, ``ADDRESS#N`` one VF."""

NOTHING = frozenset[str]()
"""The scope of no device."""

OWN = "pf"


def own(address: str) -> str:
    """The name of a PF without its VFs."""
    return f"{address}#{OWN}"


def alone(target: str) -> str:
    """The name of one function: of a VF, or of a PF without its VFs."""
    return target if is_vf(target) else own(target)


def joined(one: Scope, other: Scope) -> Scope:
    """Both scopes as one."""
    return None if one is None or other is None else one | other


@lru_cache(maxsize=64)
def devices(scope: frozenset[str]) -> frozenset[str]:
    """The PFs that a scope names, themselves or by one of their functions. Cached: a pass asks fifty times for the same."""
    return frozenset(device_of(name) for name in scope)


def host_in_scope(scope: Scope) -> bool:
    """Whether ``scope`` includes the state that belongs to the host and to no device."""
    return scope is None or HOST in scope


def in_scope(want: Wanted, scope: Scope) -> list[str]:
    """The PCI addresses of the wanted PFs that ``scope`` names, themselves or by one of their VFs, sorted."""
    if scope is None:
        return sorted(want.nics)
    return sorted(want.nics.keys() & devices(scope))


def pfs_in_scope(want: Wanted, scope: Scope) -> list[str]:
    """The PCI addresses of the wanted PFs whose own function ``scope`` includes, sorted."""
    return [address for address in in_scope(want, scope) if scope is None or scope & {address, own(address)}]


def functions_in_scope(files: Files, want: Wanted, scope: Scope) -> dict[str, dict[str, str]]:
    """For each wanted PF in ``scope``, the included functions (PF and VFs): target to PCI address."""
    result = {}
    for address in in_scope(want, scope):
        if scope is None or address in scope:
            result[address] = targets(files, address)
            continue
        named = {name for name in scope if name.startswith(f"{address}#")}
        functions = {address: address} if own(address) in named else {}
        for target in sorted(named - {own(address)}):
            with suppress(FileNotFoundError):
                functions[target] = pci_of(files, target)
        result[address] = functions
    return result
