"""A new user's way: a bare system becomes a control host, `trackbed init` makes a site, which is deployed and upgraded.

Rocky Linux 9 itself was not run. Of what it has, its Python and glibc are compared with the lock here, and
tests/unit/test_makefile.py shows that `make control` takes a newer Python beside one that is too old.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import MACHINES, Node
from tests.lab.conftest import FRESH, ROOT, ready
from tests.lab.control_host import UBUNTU, ControlHost, fresh, sources_of
from tests.programs import success

pytestmark = pytest.mark.campaign

SITE = "/srv/fleet"
INVENTORY = f"{SITE}/inventories/prod.py"
NIC = MACHINES[0].nics[0]


SUITES = {"Debian 12": "bookworm", "Debian 13": "trixie", "Ubuntu 22.04": "jammy", "Ubuntu 24.04": "noble"}


@pytest.fixture(params=[*SUITES.values()], ids=[*SUITES])
def control(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ControlHost]:
    """A bare system of this suite."""
    if not sources_of(request.param):
        pytest.skip(f"{UBUNTU} names no archive of Ubuntu")
    with fresh(request.param, tmp_path) as host:
        yield host


def done(host: ControlHost, *words: str, cwd: str = "/srv") -> str:
    """What a program says that must succeed."""
    ended = host.run(*words, cwd=cwd)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def checkout(host: ControlHost, revision: str) -> str:
    """The folder of a checkout of this project with the control host's environment in it."""
    folder = host.root / "srv" / revision
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", ROOT, folder], check=True)
    subprocess.run(["git", "-C", folder, "checkout", "--quiet", revision], check=True)
    done(host, "make", "control", cwd=f"/srv/{revision}")
    return f"/srv/{revision}"


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout.strip()


def write_site(host: ControlHost, node: Node) -> None:
    """Three lines of an inventory: how the server is reached, and what it should be."""
    for name, path in (("key", node.ssh_key), ("known_hosts", node.known_hosts)):
        shutil.copy(path, host.root / "srv" / name)
    where = {**node.connection, "ssh_key": "/srv/key", "ssh_known_hosts_file": "/srv/known_hosts"}
    nics = [{"name": "rail0", "select": {"pci": NIC.pci}, "vfs": {"count": 4}}]
    lines = (f"hosts = {[(node.name, where)]}", f"nics = {nics}", "servers = (hosts, {'nics': nics})")
    host.write(INVENTORY, "\n".join(lines))


def vfs(node: Node) -> dict[str, str]:
    """The index of each VF's netdev, by the VF's address: a VF that was made anew has another."""
    each = f"for vf in /sys/bus/pci/devices/{NIC.pci}/virtfn*; do echo $(readlink $vf) $(cat $vf/net/*/ifindex); done"
    return dict(line.split() for line in node.sh(each).splitlines())


def test_a_site_is_made_shown_deployed_and_upgraded(control: ControlHost, deployed: tuple[Node, ...]) -> None:
    node, now = deployed[0], checkout(control, git("rev-parse", "HEAD"))
    node.restore(FRESH)
    done(control, f"{now}/.venv/bin/trackbed", "init", SITE, cwd=now)
    write_site(control, node)
    shown = done(control, f"{now}/.venv/bin/pyinfra", INVENTORY, "deploy.py", "--dry", cwd=now)
    assert "plan: unknown until" in shown
    assert node.run(["test", "-e", "/etc/trackbed"]).returncode, "a dry run has left something"
    former = git("describe", "--tags", "--abbrev=0")
    if former:
        before = checkout(control, former)
        done(control, f"{before}/.venv/bin/pyinfra", "-y", INVENTORY, "deploy.py", cwd=before)
        assert ready(node)
        made = vfs(node)
        assert len(made) == 4
        shown = done(control, f"{now}/.venv/bin/pyinfra", INVENTORY, "deploy.py", "--dry", cwd=now)
    done(control, f"{now}/.venv/bin/pyinfra", "-y", INVENTORY, "deploy.py", cwd=now)
    assert ready(node)
    assert len(vfs(node)) == 4
    assert not former or vfs(node) == made, "an upgrade disturbs no VF"


def test_each_package_of_the_lock_has_a_wheel_for_rocky_linux_9(tmp_path: Path) -> None:
    """It has Python 3.12 beside its own, and glibc 2.34. pip takes the platforms literally."""
    platforms = [
        f"--platform=manylinux{name}_x86_64" for name in ("1", "2010", "2014", *(f"_2_{n}" for n in range(5, 35)))
    ]
    python = ["--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none"]
    lock = ["--no-deps", "--only-binary=:all:", "--require-hashes", f"--requirement={ROOT}/requirements/control.txt"]
    words = [sys.executable, "-m", "pip", "install", "--dry-run", f"--target={tmp_path}", *python, *platforms, *lock]
    success(subprocess.run(words, capture_output=True, text=True, check=False))
