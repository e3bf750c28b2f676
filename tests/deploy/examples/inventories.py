"""pyinfra's own reading of an inventory file.

It runs in a process of its own: importing `pyinfra_cli` puts gevent's threads, locks and subprocesses in the place of Python's,
on which pytest-xdist then waits for ever.
"""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from pyinfra.api.inventory import Inventory

from tasks.common import archive
from tasks.common.site import root_of

READ = """
import pickle, sys
from pyinfra.api.state import State
from pyinfra.context import ctx_state
from pyinfra_cli.inventory import make_inventory
from tasks.common import layers
state = State()
state.cwd = sys.argv[1]
with ctx_state.use(state):
    made = make_inventory(sys.argv[2], cwd=state.cwd)
faults = [fault for host in made for fault in layers.merge(host)]
assert not faults, faults
hosts = [(host.name, host.data.dict()) for host in made]
groups = {name: ([host.name for host in hosts], {}) for name, hosts in made.groups.items()}
sys.stdout.buffer.write(pickle.dumps((hosts, groups)))
"""


def inventory_of(path: Path) -> Any:
    """pyinfra's inventory of a file, with the group data of its site."""
    words = [sys.executable, "-W", "ignore", "-c", READ, str(root_of(path)), str(path)]
    done = subprocess.run(words, cwd=archive.ROOT, stdout=subprocess.PIPE, check=True)
    hosts, groups = pickle.loads(done.stdout)  # noqa: S301  made by this test
    return Inventory((hosts, {}), **groups)  # type: ignore[no-untyped-call]
