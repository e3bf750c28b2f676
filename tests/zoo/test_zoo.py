"""What Trackbed makes of each machine of the zoo is what stands beside its file, which somebody has read and found right."""

import json
import re
from pathlib import Path

import pytest

from cli import topology
from cli.as_inventory import derive_inventory
from cli.inspection import inspect, render
from tests.sim.machine_file import load
from tests.zoo.describe import describe
from tests.zoo.walk import HOST, machines, result

MADE_UP = re.compile(r"[0-9a-f:]*(?:[0-9a-f]{2}:){5}[0-9a-f]{2}|(?:[0-9a-f]{4}:){3}[0-9a-f]{4}|fe80::[0-9a-f:]*")
"""MACs, GUIDs and GIDs."""


def shown(file: Path) -> str:
    """What the commands show of a machine, without the addresses that the file leaves out."""
    machine = load(file).kernel.machine()
    starter = derive_inventory(machine, HOST, HOST, ())
    tree = topology.render(topology.arrange(machine), 100)
    texts = [render(inspect(machine)), starter.text, *starter.remaining, *(line for line, _ in tree)]
    return MADE_UP.sub("-", "\n".join(texts))


@pytest.mark.parametrize("file", machines(), ids=lambda file: file.stem)
def test_a_machine_that_describes_itself_is_the_same(file: Path, tmp_path: Path) -> None:
    described = tmp_path / "described.yaml"
    text = json.dumps(describe(load(file).kernel.machine()))
    assert all(each.startswith("0200:00ff:fe00:") for each in MADE_UP.findall(text)), "it has an address of the server"
    described.write_text(text)
    assert shown(described) == shown(file)


@pytest.mark.parametrize("file", machines(), ids=lambda file: file.stem)
def test_the_whole_way(file: Path, tmp_path: Path) -> None:
    """To write the results anew: `.venv/bin/python -m tests.zoo`."""
    assert result(file, tmp_path) == file.with_suffix(".txt").read_text()
