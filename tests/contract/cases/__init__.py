"""Behaviour of the kernel on which the engine relies, one module for each subject. Each case must hold on the fake and on a
real node; if it does not, the fake is wrong.

A case is a function of a :class:`Machine` and the PCI address of a PF with at most 7 VFs. It has plain assertions, so that it
runs on a node that has only its own Python.
"""

import importlib
import pkgutil
from collections.abc import Callable

from agent.machine import Machine

Case = Callable[[Machine, str], None]


def _cases() -> tuple[Case, ...]:
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return tuple(
        case
        for module in modules
        for name, case in sorted(vars(module).items())
        if callable(case) and getattr(case, "__module__", "") == module.__name__ and not name.startswith("_")
    )


CASES = _cases()
