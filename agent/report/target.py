"""Targets: the names of functions in plans, reports and readings. A PF's is its PCI address, and its VF N's is ``ADDRESS#N``.

A VF's own PCI address would not do: it exists only while the VF exists. A target is a text and no record, since a pass over a
thousand VFs makes and compares tens of thousands.
"""

from __future__ import annotations


def vf_target(address: str, index: int) -> str:
    """The target of a VF of the PF at ``address``."""
    return f"{address}#{index}"


def device_of(target: str) -> str:
    """The PCI address of the PF: the target itself, or the PF of the VF."""
    return target.partition("#")[0]


def is_vf(target: str) -> bool:
    """Whether a target is a VF."""
    return "#" in target


def vf_index(target: str) -> int:
    """The index of a VF.

    :raises ValueError: the target is a PF.
    """
    return int(target.partition("#")[2])
