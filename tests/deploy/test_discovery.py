"""deploys/discover.py on 200 servers made from the zoo: the files that it writes give each server what it has."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cattrs
import pytest
from attrs import evolve

from agent.engine.dry_run import dry_run
from cli.as_inventory import derive_inventory
from tasks.discovery import NodeInventory
from tasks.discovery.profiles import Server, profiles
from tasks.node_spec import node_spec
from tests.deploy.conftest import Answers, of
from tests.deploy.examples.inventories import inventory_of
from tests.deploy.fake import inventory, pyinfra
from tests.deploy.test_agent import BASE, NEW, versions
from tests.programs import success
from tests.sim.machine_file import SimMachine, load
from tests.stand_ins import text_file
from tests.zoo.walk import machines

COUNT = 200


def servers(count: int) -> Iterator[tuple[str, SimMachine]]:
    """Machines of the zoo, each several times. Of each kind, the third has another MTU, and the fourth a NIC that is down."""
    files = machines()
    for number in range(count):
        machine = load(files[number % len(files)])
        kernel = machine.kernel
        routed = kernel.routed
        netdevs = [each for name, each in sorted(kernel.netdevs.items()) if name not in routed and each.link.up]
        if netdevs and number // len(files) == 2:
            last = netdevs[-1].link
            kernel.netlink.set_link(last.ifindex, mtu=min(4050, last.max_mtu - 1))
        if netdevs and number // len(files) == 3:
            kernel.netlink.set_link(netdevs[0].link.ifindex, up=False)
        yield f"{files[number % len(files)].stem}-{number:03}", machine


def facts(machine: SimMachine, name: str) -> dict[str, Any]:
    return dict(derive_inventory(machine.kernel.machine(), name, name, ()).facts)


def answering(facts: object) -> Answers:
    return {**BASE, **versions(None, NEW), of(NodeInventory): ["a library's warning", json.dumps(facts)]}


def discover(
    folder: Path, hosts: dict[str, dict[str, Any]], *options: str, more: str = ""
) -> subprocess.CompletedProcess[str]:
    made = [(f"@fake/{name}", {"node_name": name, **data}) for name, data in hosts.items()]
    (folder / "inventories").mkdir(exist_ok=True)
    inventory(folder / "inventories/site.py", f"{made!r}\n{more}")
    return again(folder, *options)


def again(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return pyinfra("-y", folder / "inventories/site.py", "deploys/discover.py", *options)


def flat(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_the_groups_of_200_servers_give_each_what_it_has(tmp_path: Path) -> None:
    fleet = dict(servers(COUNT))
    known = {name: facts(machine, name) for name, machine in fleet.items()}
    success(discover(tmp_path, {name: {"fake_responses": answering(each)} for name, each in known.items()}))
    made = inventory_of(tmp_path / "inventories/site_by_hardware.py")
    assert len(made.hosts) == COUNT
    groups = {path.stem for path in (tmp_path / "group_data").iterdir()}
    assert len(groups) == len(machines())
    for host in made:
        machine = fleet[host.name.removeprefix("@fake/")].kernel.machine()
        assert len(groups & set(host.groups)) == 1
        plan = dry_run(machine, node_spec(host.data.dict(), host.name))
        assert (plan.changes, plan.errors) == ((), ()), host.name
    hardware = {name: frozenset(groups & set(made.get_host(f"@fake/{name}").groups)) for name in fleet}
    for name in fleet:
        alike = {other for other in fleet if hardware[other] == hardware[name]}
        assert alike == {other for other in fleet if other.rpartition("-")[0] == name.rpartition("-")[0]}


def fleet_of(kind: str, count: int) -> tuple[SimMachine, dict[str, dict[str, Any]]]:
    machine = load(next(file for file in machines() if file.stem == kind))
    return machine, {f"gpu-{number}": facts(machine, f"gpu-{number}") for number in range(1, count + 1)}


def test_the_files_read_as_a_person_would_write_them(tmp_path: Path) -> None:
    _, known = fleet_of("hgx-b200", 3)
    odd = known["gpu-2"]
    odd["node_name"] = "worker-2"
    odd["nics"][1]["mtu"] = 4050
    hosts: dict[str, Any] = {name: {"fake_responses": answering(each)} for name, each in known.items()}
    hosts["gpu-2"]["node_name"] = None
    success(discover(tmp_path, hosts))
    text = (tmp_path / "group_data" / "mlx5_core_x8_gpu_x8.py").read_text()
    assert text.startswith('"""3 servers with the same hardware.')
    assert text.count('"mtu": ') == 1
    assert text.count("**_SETTINGS},") == 8
    assert re.search(r"^# 0000:\S+ \[15b3:\w+\] mlx5_core NUMA node 0$", text, re.MULTILINE)
    written = (tmp_path / "inventories/site_by_hardware.py").read_text()
    assert '    "@fake/gpu-1",\n' in written
    assert '"node_name": "worker-2"' in written
    assert f'"nic_overrides": {{"{odd["nics"][1]["name"]}": {{"mtu": 4050}}}}' in written
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", "--line-length", "128", str(tmp_path / "group_data")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert formatted.returncode == 0, formatted.stdout


def test_what_the_asked_inventory_gives_counts_before_what_was_found(tmp_path: Path) -> None:
    _, known = fleet_of("lab-node", 2)
    text_file(tmp_path / "group_data" / "site.py", "site_rack = 7\n")
    (tmp_path / "group_data" / "admin.py").write_text("ready_timeout = 9\n")
    own: dict[str, dict[str, Any]] = {"gpu-1": {"nics": []}, "gpu-2": {}}
    hosts = {name: {"fake_responses": answering(known[name]), **data} for name, data in own.items()}
    done = discover(tmp_path, hosts, more="admin = ['@fake/gpu-2']\n_secret = 'hunter2'\n")
    assert done.returncode == 0, done.stderr
    assert "[@fake/gpu-1] the inventory has nics" in flat(done)
    assert "[@fake/gpu-2] the inventory has" not in flat(done)
    first, second = inventory_of(tmp_path / "inventories/site_by_hardware.py")
    assert first.data.dict()["nics"] == []
    assert len(second.data.dict()["nics"]) == 2
    assert first.data.dict()["site_rack"] == second.data.dict()["site_rack"] == 7
    assert second.data.dict()["ready_timeout"] == 9
    written = (tmp_path / "inventories/site_by_hardware.py").read_text()
    assert "hunter2" not in written and "fake_responses" not in written


def test_nothing_is_replaced(tmp_path: Path) -> None:
    _, known = fleet_of("lab-node", 1)
    hosts = {"gpu-1": {"fake_responses": answering(known["gpu-1"])}}
    assert discover(tmp_path, hosts).returncode == 0
    refused = again(tmp_path)
    assert refused.returncode == 1
    assert f"{tmp_path}/inventories/site_by_hardware.py: exists" in flat(refused)
    (tmp_path / "inventories/site_by_hardware.py").unlink()
    (group,) = (tmp_path / "group_data").iterdir()
    group.write_text("mine = 1\n")
    refused = again(tmp_path)
    assert refused.returncode == 1
    assert f"{group}: exists" in flat(refused)
    assert group.read_text() == "mine = 1\n"
    assert not (tmp_path / "inventories/site_by_hardware.py").exists()


def test_a_node_that_does_not_answer_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    _, known = fleet_of("lab-node", 1)
    wrong = {**known["gpu-1"], "nics": [{"name": "x", "select": {"pci": "0000:01:00.0"}, "mtu": "1; import os"}]}
    hosts = {
        "gpu-1": {"fake_responses": answering(known["gpu-1"])},
        "silent": {"fake_responses": {**answering(None), of(NodeInventory): ["trackbed: it broke"]}},
        "wrong": {"fake_responses": answering(wrong)},
    }
    done = discover(tmp_path, hosts, "--fail-percent", "100")
    assert done.returncode == 1
    assert "[@fake/silent] " in flat(done) and "trackbed: it broke" in flat(done)
    assert "[@fake/wrong] what the node has cannot be" in flat(done)
    assert "not asked: @fake/silent, @fake/wrong" in flat(done)
    names = re.findall(r'"(@fake/[^"]*)"', (tmp_path / "inventories/site_by_hardware.py").read_text())
    assert names == ["@fake/gpu-1"]


def test_hosts_that_are_asked_one_by_one_are_all_written(tmp_path: Path) -> None:
    _, known = fleet_of("lab-node", 2)
    success(discover(tmp_path, {name: {"fake_responses": answering(each)} for name, each in known.items()}, "--serial"))
    assert (tmp_path / "inventories/site_by_hardware.py").read_text().count("@fake/gpu-") == 2


def test_of_two_kinds_of_hardware_with_the_same_drivers_each_has_a_name() -> None:
    one = cattrs.structure(facts(fleet_of("lab-node", 0)[0], "a"), Server)
    moved = [evolve(each, address=each.address.replace("0000:", "0001:")) for each in one.functions]
    nics = [
        {**nic, "select": {**nic["select"], "pci": nic["select"]["pci"].replace("0000:", "0001:")}} for nic in one.nics
    ]
    other = evolve(one, node_name="b", functions=tuple(moved), nics=tuple(nics))
    third = evolve(one, node_name="c")
    found = profiles({"a": one, "b": other, "c": third}, {"igb_x2"})
    assert [(each.name, [*each.servers]) for each in found] == [("igb_x2_2", ["a", "c"]), ("igb_x2_3", ["b"])]
