"""A node that looks like Ubuntu 22.04 (lab/lookalikes/ubuntu.py): netplan, and unattended-upgrades that has apt's lock."""

from collections.abc import Iterator

import pytest

from lab import Node
from tests.lab.conftest import FRESH, changed, deploy, eventually, ready, succeeded
from tests.lab.systems.conftest import System, as_deployed, system

# A lab of its own: boots and deploys.
pytestmark = pytest.mark.campaign

# Holds dpkg's two locks, as unattended-upgrades does, until 20 s after an `apt-get install` has started.
LOCK = """
import fcntl, pathlib, time
locks = [open(f"/var/lib/dpkg/{name}", "w") for name in ("lock-frontend", "lock")]
for lock in locks: fcntl.lockf(lock, fcntl.LOCK_EX)
pathlib.Path("/run/locked").touch()

def installs(process):
    try: words = (process / "cmdline").read_bytes().split(b"\\0")
    except OSError: return False
    return words[0].endswith(b"apt-get") and b"install" in words

while not any(map(installs, pathlib.Path("/proc").glob("[0-9]*"))): time.sleep(0.2)
time.sleep(20)
pathlib.Path("/run/waited-for").touch()
"""


@pytest.fixture(scope="module")
def ubuntu() -> Iterator[System]:
    """The node."""
    with system("ubuntu-22.04") as made:
        yield made


def test_a_fresh_node_is_ready_after_one_deploy_and_a_second_one_changes_nothing(ubuntu: System) -> None:
    node = as_deployed(ubuntu)
    assert node.sh(". /etc/os-release; echo $ID $VERSION_ID").split() == ["ubuntu", "22.04"]
    assert "netplan" in node.sh("networkctl --no-pager status | cat; ls /run/systemd/network")
    assert ready(node)
    assert changed(deploy()) == []


def test_a_deploy_waits_for_the_upgrades_that_have_apt_s_lock(ubuntu: System) -> None:
    node: Node = ubuntu.node
    node.restore(FRESH)
    node.run(["systemd-run", "--quiet", "--unit=upgrades", "python3", "-c", LOCK], check=True)
    eventually("apt's lock", lambda: node.run(["test", "-e", "/run/locked"]).returncode == 0)
    succeeded(deploy())
    assert node.run(["test", "-e", "/run/waited-for"]).returncode == 0
    assert ready(node)
