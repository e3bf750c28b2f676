"""How plans, reports and readings name a function of a NIC: the PF by its PCI address, a VF as ``ADDRESS#N``.

A VF's own PCI address would not do: it exists only while the VF does. Targets are texts, not records, since a pass over a
thousand VFs makes and compares them by the ten thousand.
"""

from __future__ import annotations


def vf_target(address: str, index: int) -> str:
    """The target of a VF of the PF at ``address``."""
    return f"{address}#{index}"


def device_of(target: str) -> str:
    """The PCI address of the PF that a target is, or is a VF of."""
    return target.partition("#")[0]


def is_vf(target: str) -> bool:
    """Whether a target is a VF."""
    return "#" in target


def vf_index(target: str) -> int:
    """The index of the VF that a target is.

    :raises ValueError: it is a PF.
    """
    return int(target.partition("#")[2])
