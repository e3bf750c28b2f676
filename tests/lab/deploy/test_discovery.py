"""deploys/discover.py on two nodes without an agent: one group, and data by which nothing would change."""

from pathlib import Path

from agent.spec.node import to_json
from lab import Node
from tasks.agent import folder
from tasks.common import archive
from tasks.node_spec import node_spec
from tests.deploy.examples.inventories import inventory_of
from tests.lab.conftest import FRESH, pyinfra, succeeded
from tests.stand_ins import text_file


def test_two_equal_nodes_are_one_group_and_nothing_would_change(deployed: tuple[Node, ...], tmp_path: Path) -> None:
    for node in deployed:
        node.restore(FRESH)
    asked = tmp_path / "inventories" / "prod.py"
    text_file(asked, f"servers = {[(node.name, node.connection) for node in deployed]!r}\n")
    succeeded(pyinfra("-y", str(asked), "deploys/discover.py"))
    assert [file.name for file in (tmp_path / "group_data").iterdir()] == ["igb_x2.py"]
    found = inventory_of(asked.with_name("prod_by_hardware.py"))
    assert {host.name for host in found if {"igb_x2", "servers"} <= set(host.groups)} == {
        node.name for node in deployed
    }
    for node in deployed:
        spec = node_spec(found.get_host(node.name).data.dict(), node.name)
        command = ["python3", "-I", folder(archive.version("x86_64")), "plan", "--spec", "-"]
        succeeded(node.run(command, stdin=to_json(spec)))
