"""Imports pyroute2 without modules that nothing here uses: NDB, IPDB, SQLite, unittest, TLS and traffic control.

Those modules take nine megabytes of memory. In a process that has imported this module, `from pyroute2 import IPRoute` fails,
and `from pyroute2.iproute.linux import IPRoute` works. asyncio, which pyroute2 imports, has no TLS there.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from typing import Any


class _Nothing:
    """Stands for a module that nothing here uses. Each attribute, and the result of each call, is this object again."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):  # the importer's own questions
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> _Nothing:
        return self


if "pyroute2" not in sys.modules and (_spec := find_spec("pyroute2")) is not None:
    sys.modules["pyroute2"] = module_from_spec(_spec)  # its __init__ is not run

_unused = [name for name in ("ssl", "unittest", "pyroute2.netlink.rtnl.tcmsg") if name not in sys.modules]
for _name in _unused:
    sys.modules[_name] = _Nothing()  # type: ignore[assignment]

import pyroute2.iproute  # noqa: E402, F401  first: pyroute2.netlink.rtnl.iprsocket cannot be imported before it

for _name in _unused:
    del sys.modules[_name]
