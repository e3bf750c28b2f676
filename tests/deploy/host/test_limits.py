import shlex
from pathlib import Path

import pytest

from tasks.common import units
from tasks.host import limits
from tasks.host.limits import LimitedDaemons
from tests.deploy.conftest import Answers, Node, file_lines, of
from tests.deploy.scripts import ran, sh
from tests.stand_ins import program, text_file

FILES, LIMITED = of(units.DropIns), of(LimitedDaemons)


def drop_in(daemon: str, folder: object = units.FOLDER) -> str:
    return f"{folder}/{daemon}.service.d/{limits.DROP_IN}"


IN_PLACE = {limits.LOGINS: limits.LOGINS_TEXT, **{drop_in(each): limits.DROP_IN_TEXT for each in limits.DAEMONS}}


def has(files: dict[str, str], *limited: str) -> Answers:
    return {FILES: file_lines(files), LIMITED: list(limited)}


def test_a_fresh_node_gets_the_files_and_its_daemons_the_limit(node: Node) -> None:
    result = node.deploy(limits.lift, has({}, "limited containerd", "running containerd"), limits={})
    assert result.uploads.keys() >= {
        path.replace("/trackbed", "/.trackbed") + ".new" for path in map(drop_in, limits.DAEMONS)
    }
    command = result.flat[-1]
    assert "systemctl daemon-reload" in command
    assert "systemctl restart" not in command
    assert command.endswith(" containerd docker crio kubelet k3s k3s-agent rke2-server rke2-agent")


@pytest.mark.parametrize(("more", "done"), [([], 0), (["running docker"], 1), (["limited docker"], 1)])
def test_only_a_running_daemon_without_the_limit_gets_it_although_its_drop_in_is_there(
    node: Node, more: list[str], done: int
) -> None:
    result = node.deploy(limits.lift, has(IN_PLACE, *more), limits={})
    assert (list(result.planned.values()), len(result.flat)) == ([bool(done)], done)


def test_without_the_key_nothing_is_done(node: Node) -> None:
    assert node.deploy(limits.lift, has({})).flat == []


def test_what_left_the_inventory_leaves_the_node(node: Node) -> None:
    command, folders = node.deploy(limits.lift, has({drop_in("containerd"): "x\n", limits.LOGINS: "x\n"})).flat
    # Neither services nor a text for logins.
    assert shlex.split(command)[4:] == ["remove", drop_in("containerd"), "remove", limits.LOGINS, "--", ""]
    assert folders.endswith(f" {units.FOLDER}/containerd.service.d")


@pytest.mark.parametrize("others", [True, False])
def test_systemd_is_told_of_a_drop_in_that_is_gone_although_it_did_not_read_its_units_before(
    node: Node, tmp_path: Path, others: bool
) -> None:
    folder = tmp_path / "slurmd.service.d"
    text_file(folder / limits.DROP_IN, limits.DROP_IN_TEXT)
    (tmp_path / "other.service.d").mkdir()
    if others:
        (folder / "mine.conf").write_text("")

    def found() -> dict[str, str]:
        return units.DropIns().process(sh(units._DROP_INS, tmp_path, limits.DROP_IN, tmp_path / "logins"))

    def run() -> list[int]:
        commands = node.deploy(limits.lift, has(found())).flat
        return [ran(each, tmp_path / "bin").returncode for each in commands]

    program(tmp_path / "bin/systemctl", "exit 1")
    assert run()[0] == 1
    assert not (folder / limits.DROP_IN).exists()
    assert found().keys() == {drop_in("slurmd", tmp_path)}
    program(tmp_path / "bin/systemctl", f"echo $1 > {tmp_path}/asked")
    assert run() == [0, 0]
    assert (tmp_path / "asked").read_text() == "daemon-reload\n"
    assert [file.name for file in folder.glob("*")] == ["mine.conf"] * others
    assert folder.exists() is others
    assert found() == {}


def test_the_files_are_written_if_the_fact_has_no_output(node: Node) -> None:
    assert drop_in("slurmd") in node.deploy(limits.lift, {}, limits={"daemons": ["slurmd"], "logins": False}).flat[-1]
