from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import agent.linux
print(*(name for name in ("sqlite3", "ssl", "unittest", "unittest.mock", "pyroute2.ndb.main") if name in sys.modules))
from ssl import SSLContext
from unittest.mock import Mock
print(SSLContext.__module__, Mock.__module__)
"""


def test_what_pyroute2_imports_for_others_is_left_out_and_can_still_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "\nssl unittest.mock\n"
