from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks.host import limits
from tasks.host.limits import MemoryLimits
from tests.deploy.conftest import Answers, Node, of
from tests.deploy.scripts import sh
from tests.stand_ins import program

FIND = of(MemoryLimits)
UNITS = limits.DAEMONS


def in_place(*units: str) -> Answers:
    return {FIND: ["logins", *(f"current {unit}" for unit in units)]}


def test_a_fresh_node_gets_the_files_and_its_daemons_the_limit(node: Node) -> None:
    node.data = {"limits": {}}
    result = node.deploy(limits.lift, {FIND: ["limited containerd", "running containerd"]})
    [command] = result.flat
    assert "systemctl daemon-reload" in command
    assert "systemctl restart" not in command
    assert command.endswith(" containerd docker crio kubelet k3s k3s-agent rke2-server rke2-agent")


def test_nothing_is_done_if_all_is_in_place(node: Node) -> None:
    node.data = {"limits": {}}
    result = node.deploy(limits.lift, in_place(*UNITS))
    assert set(result.planned.values()) == {False}
    assert result.flat == []


@pytest.mark.parametrize("more", ["running docker", "limited docker", "old slurmd"])
def test_a_running_daemon_without_the_limit_gets_it_although_its_drop_in_is_there(node: Node, more: str) -> None:
    node.data = {"limits": {}}
    report = [*in_place(*UNITS)[FIND], more]
    assert len(node.deploy(limits.lift, {FIND: report}).flat) == 1


def test_without_the_key_nothing_is_done(node: Node) -> None:
    assert node.deploy(limits.lift, in_place()).flat == []


def test_what_left_the_inventory_leaves_the_node(node: Node) -> None:
    [command] = node.deploy(limits.lift, {FIND: ["old containerd"]}).flat
    # Neither services nor a text for logins.
    assert command.endswith(f"{limits.LOGINS} ''")


@pytest.mark.parametrize("others", [True, False])
def test_systemd_is_told_of_a_drop_in_that_is_gone_although_it_did_not_read_its_units_before(
    tmp_path: Path, others: bool
) -> None:
    folder = tmp_path / "etc/systemd/system/slurmd.service.d"
    folder.mkdir(parents=True)
    (folder / limits.DROP_IN).write_text(limits.DROP_IN_TEXT)
    if others:
        (folder / "mine.conf").write_text("")
    given = (tmp_path, limits.DROP_IN, limits.DROP_IN_TEXT, tmp_path / "logins", "")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    program(tmp_path / "bin/systemctl", "exit 1")
    with pytest.raises(AssertionError):
        sh(limits._LIFT, *given, PATH=path)
    assert not (folder / limits.DROP_IN).exists()
    assert MemoryLimits().process(sh(limits._STATE, *given, PATH=path)).old == {"slurmd"}
    program(tmp_path / "bin/systemctl", f"echo $1 > {tmp_path}/asked")
    sh(limits._LIFT, *given, PATH=path)
    assert (tmp_path / "asked").read_text() == "daemon-reload\n"
    assert [file.name for file in folder.glob("*")] == ["mine.conf"] * others
    assert folder.exists() is others
    assert MemoryLimits().process(sh(limits._STATE, *given, PATH=path)).old == frozenset()


def test_the_files_are_written_if_the_fact_has_no_output(node: Node) -> None:
    node.data = {"limits": {"daemons": ["slurmd"], "logins": False}}
    assert len(node.deploy(limits.lift, {}).flat) == 1
