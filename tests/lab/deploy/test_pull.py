"""Pull mode: a node deploys itself from a signed archive, and from no other."""

import json
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import Node, repository
from tasks import pull as pull_mode
from tests.deploy.pull.keys import gpg, make_key
from tests.lab.conftest import ROOT, deploy, ready, succeeded

pytestmark = pytest.mark.campaign

ARCHIVE = "trackbed.tar.gz"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """What is in the folder `served`, over HTTP."""
    (tmp_path / "served").mkdir()
    with repository.serve(tmp_path / "served") as url:
        yield url


def site(folder: Path, data: dict[str, Any]) -> Path:
    """A site with an inventory of one node."""
    for name in ("inventories", "group_data"):
        (folder / name).mkdir(parents=True)
    (folder / "inventories/pulled.py").write_text(f"virtual = [('node1', {data!r})]\n")
    shutil.copyfile(ROOT / "group_data/lab.py", folder / "group_data/pulled.py")
    return folder


def test_a_node_deploys_itself(node: Node, tmp_path: Path, server: str) -> None:
    make_key(tmp_path / "k", tmp_path / "fleet.gpg")
    pull = {"url": f"{server}/{ARCHIVE}", "keyring": str(tmp_path / "fleet.gpg"), "inventory": "inventories/pulled.py"}
    # Read now: it asks the lab, which was down when this file was imported.
    virtual = runpy.run_path(str(ROOT / "inventories/lab.py"))["virtual"]
    data = next(data for name, data in virtual if name == "node1")
    nics = [{**data["nics"][0], "mtu": 8000}, data["nics"][1]]
    archive = tmp_path / "served" / ARCHIVE
    pull_mode.build(archive, ("3.11-x86_64",), site(tmp_path / "site", {"nics": nics, "pull": pull}))
    gpg(tmp_path / "k", "--detach-sign", str(archive))

    succeeded(deploy(pull=pull))
    assert node.sh("systemctl is-active trackbed-pull.timer").strip() == "active"
    assert '"mtu": 9000' in node.sh("cat /etc/trackbed/node.json")

    started = node.run(["systemctl", "start", "trackbed-pull.service"], timeout=1200)
    journal = node.sh("journalctl -u trackbed-pull.service -o cat --no-pager")
    assert started.returncode == 0, journal
    assert '"mtu": 8000' in node.sh("cat /etc/trackbed/node.json")
    assert node.sh("cat /sys/class/net/ens1f0/mtu").strip() == "8000"
    assert '"node_name": "node1"' in node.sh("cat /etc/trackbed/node.json")
    assert json.loads(node.sh("cat /etc/trackbed/pull.json"))["host"] == "node1"
    assert ready(node)

    # With the same signature it would not be fetched.
    make_key(tmp_path / "other", tmp_path / "other.gpg")
    archive.with_name(f"{ARCHIVE}.sig").unlink()
    gpg(tmp_path / "other", "--detach-sign", str(archive))
    assert node.run(["systemctl", "start", "trackbed-pull.service"], timeout=300).returncode != 0
    journal = node.sh("journalctl -u trackbed-pull.service -o cat --no-pager")
    assert "no key in /etc/trackbed/pull.gpg" in journal
    assert ready(node)
