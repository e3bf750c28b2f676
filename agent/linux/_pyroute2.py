"""Imports pyroute2 without the modules that it imports for its users and its tests (NDB, IPDB, SQLite, unittest).

They have seven megabytes. So `from pyroute2 import IPRoute` fails in a process that has imported this; `from
pyroute2.iproute.linux import IPRoute` works.
"""

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType, SimpleNamespace
from typing import Any


class _Mock:
    """In place of unittest's: pyroute2 makes one for the queue that a synchronous socket does not have."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


if "pyroute2" not in sys.modules and (_spec := find_spec("pyroute2")) is not None:
    sys.modules["pyroute2"] = module_from_spec(_spec)  # its __init__ is not run

_unittest = sys.modules.get("unittest")
if _unittest is None:
    sys.modules["unittest"] = ModuleType("unittest")
    vars(sys.modules["unittest"])["mock"] = SimpleNamespace(Mock=_Mock)

import pyroute2.iproute  # noqa: E402, F401  first: pyroute2.netlink.rtnl.iprsocket cannot be imported before it

if _unittest is None:
    del sys.modules["unittest"]
