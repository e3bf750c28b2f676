"""What a worker imports stays in its memory."""

import subprocess
import sys

CODE = """
import sys
import agent.linux
import agent.service.worker
print(*sys.modules)
from ssl import SSLContext
from unittest.mock import Mock
print(SSLContext.__module__, Mock.__module__)
"""


def test_what_pyroute2_imports_for_others_is_left_out_and_can_still_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    modules, later = done.stdout.splitlines()
    assert "pyroute2.netlink.rtnl.ifinfmsg" in modules.split()
    left_out = {"sqlite3", "ssl", "hashlib", "unittest", "psutil", "pyroute2.ndb", "pyroute2.ipdb"}
    assert not (left_out | {"pyroute2.netlink.rtnl.tcmsg"}) & set(modules.split())
    assert later == "ssl unittest.mock"
