"""What docs/adding-a-task.md promises: a task and a vendor's driver are each added by one new file in tasks/.

The files are the examples of that page.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyinfra.api.exceptions import DeployError

import tasks.drivers
import tasks.host
from tasks.common import data
from tasks.common.archive import ROOT
from tasks.node_spec import node_spec
from tasks.packages.dkms import Builds, ModuleState
from tasks.packages.holds import HeldPackages
from tasks.packages.vendor_repository import KeyFingerprints
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import DEBIAN, Answers, Node, of
from tests.stand_ins import text_file

PAGE = (ROOT / "docs" / "adding-a-task.md").read_text()
FINGERPRINT = "83DB6997E7844970861FCB6BEA39500F9B4DFB6F"
REPOSITORY = {"uri": "http://repo.example.net", "key": "http://repo.example.net/key.asc", "fingerprint": FINGERPRINT}
ACME = {"acme": {"repository": REPOSITORY, "version": "1.1"}}

Add = Callable[[str], ModuleType]


def forget_the_tasks() -> None:
    for remembered in (data.task_modules, data.task_keys, data.known_keys):
        remembered.cache_clear()


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Adds an example to tasks/ by the name of its file, until the test ends."""
    examples = dict(re.findall(r"^```python\n# tasks/(\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    imported: list[str] = []

    def added(name: str) -> ModuleType:
        text_file(tmp_path / name, examples.pop(name))
        package = {"host": tasks.host, "drivers": tasks.drivers}[Path(name).parent.name]
        monkeypatch.setattr(package, "__path__", [*package.__path__, str((tmp_path / name).parent)])
        forget_the_tasks()
        made = importlib.import_module(f"{package.__name__}.{Path(name).stem}")
        imported.append(made.__name__)
        return made

    yield added
    for name in imported:
        del sys.modules[name]
    monkeypatch.undo()
    forget_the_tasks()


def faults(values: dict[str, Any]) -> str:
    with pytest.raises(DeployError) as caught:
        node_spec(values, "node-a")
    return str(caught.value)


def test_a_task_is_one_file(node: Node, add: Add) -> None:
    assert "unknown key 'swap'" in faults({"swap": {"allowed": False}})
    swap = add("host/swap.py")
    assert "node-a.swap: allowed" in faults({"swap": {"allowed": "no"}})
    node.data = {"swap": {"allowed": False}}
    active = {of(swap.ActiveSwaps): ["/dev/sda2  partition  4194300 0 -2", "/swap file 1024 0 -3"]}
    assert node.deploy(swap.configure, active).flat == ["swapoff -- /dev/sda2 /swap"]
    assert node.deploy(swap.configure, {of(swap.ActiveSwaps): []}).planned == {"No swap": False}
    assert node.deploy(swap.configure, active, swap={"allowed": True}).flat == []


def installed(loaded: str) -> Answers:
    """A node that has the driver's package and its module, and another module in memory if ``loaded`` is not AB."""
    return {
        **DEBIAN,
        of(ModuleState): ["path /lib/modules/6/updates/dkms/acme.ko", "installed AB", "users 0", loaded],
        of(Builds): "acme/1.1, 6.1.0-9-amd64, x86_64: installed",
        "uname -r": "6.1.0-9-amd64",
        of(NodeRebootRequests): ["boot-1"],
        "dpkg -l": ["ii  gpg  2.2  amd64  x", "ii  acme-dkms  1.1  amd64  x"],
        of(HeldPackages): "acme-dkms",
        of(KeyFingerprints): FINGERPRINT,
    }


def test_a_vendors_driver_is_one_file(node: Node, add: Add) -> None:
    assert "unknown key 'acme'" in faults(ACME)
    acme = add("drivers/acme.py")
    assert "node-a.acme: repository: fingerprint: " in faults(
        {"acme": {**ACME["acme"], "repository": {**REPOSITORY, "fingerprint": "1"}}}
    )
    node.data = ACME
    fresh = node.deploy(
        acme.install,
        {
            **DEBIAN,
            of(Builds): "acme/1.1, 6.1.0-9-amd64, x86_64: installed",
            "uname -r": "6.1.0-9-amd64",
            of(ModuleState): ["path "],
            of(NodeRebootRequests): ["boot-1"],
        },
    )
    assert "/etc/apt/sources.list.d/trackbed-acme.sources" in fresh.uploads
    [install, hold] = fresh.commands["ACME | Package"]
    assert install.endswith(" sh acme '' acme-dkms=1.1")
    assert hold.endswith("apt-mark hold acme-dkms")
    assert fresh.commands["ACME | Driver loaded"] == ["modprobe acme"]
    assert node.deploy(acme.install, installed("loaded AB")).commands["ACME | Driver loaded"] == []
    [request] = node.deploy(acme.install, installed("loaded CD")).commands["ACME | Driver loaded"]
    assert request.endswith(" sh /var/lib/trackbed/reboots acme 'the installed acme (AB) is not the loaded one'")


def test_the_removal_deletes_the_files_of_a_vendors_driver(add: Add) -> None:
    add("drivers/acme.py")
    assert "/etc/apt/sources.list.d/trackbed-acme.sources" in data.leftovers()
