"""What a worker imports stays in its memory."""

import subprocess
import sys

LISTED = "import sys, agent.linux; print(*sys.modules)"


def test_of_pyroute2_only_the_used_parts_are_imported() -> None:
    listed = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True).stdout.split()
    assert "pyroute2.netlink.rtnl.ifinfmsg" in listed
    assert not {"sqlite3", "psutil", "pyroute2.ndb", "pyroute2.ipdb"} & set(listed)
