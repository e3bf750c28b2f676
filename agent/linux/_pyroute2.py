"""Imports pyroute2 without the modules that it imports for its users (NDB, IPDB, SQLite): they have five megabytes.

So `from pyroute2 import IPRoute` fails in a process that has imported this; `from pyroute2.iproute.linux import IPRoute` works.
"""

import sys
from importlib.util import find_spec, module_from_spec

if "pyroute2" not in sys.modules and (_spec := find_spec("pyroute2")) is not None:
    sys.modules["pyroute2"] = module_from_spec(_spec)  # its __init__ is not run

import pyroute2.iproute  # noqa: F401  first: pyroute2.netlink.rtnl.iprsocket cannot be imported before it
