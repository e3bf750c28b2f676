from pathlib import Path

import pytest

from agent.spec.node import NodeSpec
from cli.as_inventory import derive_inventory
from tasks.common import archive
from tasks.node_spec import node_spec
from tests.deploy.examples.inventories import inventory_of
from tests.deploy.fake import pyinfra
from tests.programs import failure
from tests.sim.kernel import Kernel


def specs(name: str) -> dict[str, NodeSpec]:
    fleet = inventory_of(archive.ROOT / "inventories" / name)
    return {host.name: node_spec(host.data.dict(), host.name) for host in fleet}


def test_the_inventory_prod_gives_valid_specs() -> None:
    by_host = specs("prod.py")
    assert len(by_host) == 20
    assert {len(spec.nics) for name, spec in by_host.items() if name.startswith("gpu-")} == {8}
    assert by_host["10.0.1.11"].node_name == "cn-hangzhou.10.0.1.11"
    assert by_host["gpu-08.example.net"].disruption.allow == "none"


def test_the_inventory_of_a_lab_that_is_not_up_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKBED_LAB", "never-started")
    assert "the lab is not up; run `make lab`" in failure(pyinfra("inventories/lab.py", "debug-inventory"))


def test_an_inventory_that_a_server_wrote_gives_its_spec(tmp_path: Path) -> None:
    kernel = Kernel()
    for number in range(2):
        kernel.add_nic(f"0000:{number}1:00.0", f"ens{number}", f"02:00:00:00:0{number}:00")
    inventory = derive_inventory(kernel.machine(), "gpu-01.example.net", "gpu-01", ())
    (tmp_path / "new.py").write_text(inventory.text)
    (host,) = inventory_of(tmp_path / "new.py")
    assert {"servers", "new"} <= set(host.groups)
    spec = node_spec(host.data.dict(), host.name)
    assert (spec.node_name, [nic.name for nic in spec.nics]) == ("gpu-01", ["nic{index}"])


def test_of_several_groups_the_last_one_counts_and_after_it_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "fleet.py").write_text("zone = ['gpu-01']\nadmin = ['gpu-01', ('gpu-02', {'ready_timeout': 5})]\n")
    (tmp_path / "group_data").mkdir()
    for seconds, (group, key) in enumerate(
        (("zone", "ready_timeout"), ("admin", "ready_timeout"), ("zone", "site_rack"), ("fleet", "site_rack")), 1
    ):
        with (tmp_path / "group_data" / f"{group}.py").open("a") as file:
            file.write(f"{key} = {seconds}\n")
    first, second = (host.data.dict() for host in inventory_of(tmp_path / "fleet.py"))
    assert (first["ready_timeout"], first["site_rack"]) == (2, 4)
    assert (second["ready_timeout"], second["site_rack"]) == (5, 4)
