"""The kinds of the host as a whole: its kernel's parameters, modules and memory, and daemons that work against the agent."""

from __future__ import annotations

from collections.abc import Collection

from agent.kinds import ANY_VALUE
from agent.machine import Machine
from agent.report.records import HOST, Change
from agent.spec.sysctl_names import identity, path

SYSCTLS = "sysctls"
"""The name of the kind of kernel parameters. Several kinds set what one of these sets, too."""


def original_of_sysctl(machine: Machine, own: str, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """The original of a variable under the name of its sysctl, if it was noted under that name before; else nothing.

    :param own: the sysctl's :func:`identity`; empty if the variable has no sysctl. ``known``: as in ``Kind.originals_of``.
    """
    names = (field for kind, _, field in sorted(known) if own and kind == SYSCTLS and identity(field) == own)
    return [Change(SYSCTLS, HOST, name, words(machine.files.read(path(name))), ANY_VALUE) for name in names][:1]


def words(text: str) -> str:
    """A parameter's value in the form in which values are compared."""
    return " ".join(text.split())
