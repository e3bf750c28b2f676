"""The state of a node from before its first deploy is recorded, and only once."""

from pathlib import Path

import pytest

from tasks import original_state
from tasks.original_state import Recorded
from tasks.packages import holds
from tests.deploy.conftest import Node, files, of
from tests.deploy.scripts import sh
from tests.stand_ins import program, text_file


def test_the_original_state_is_written_once(node: Node) -> None:
    result = node.deploy(original_state.record, {})
    (made,) = result.flat
    assert made.endswith(" irqbalance.service '' /var/lib/trackbed/before")
    assert node.deploy(original_state.record, {of(Recorded): ["here"]}).did_nothing


@pytest.mark.parametrize("answer", ["\0", "Welcome to node-a", ""])
def test_another_answer_is_no_recorded_state(node: Node, answer: str) -> None:
    result = node.deploy(original_state.record, {of(Recorded): [answer]})
    assert result.failed
    assert "answer to Recorded cannot be read" in result.errors[0]


@pytest.mark.parametrize("before", ["", "mine\n"])
def test_holds_that_an_interrupted_deploy_set_are_noted(node: Node, before: str) -> None:
    result = node.deploy(original_state.record, {of(Recorded): ["here"], **files(**{holds.BEFORE: before})})
    (noted,) = result.flat
    assert noted.endswith(f" sh {holds.PATH}")


def test_the_script_records_services_vfs_and_holds(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:21:00.0"
    text_file(device / "sriov_numvfs", "3\n")
    (device / "sriov_drivers_autoprobe").write_text("1\n")
    (tmp_path / "sys/bus/pci/devices/0000:00:01.0").mkdir()
    (tmp_path / "etc/kubernetes").mkdir(parents=True)
    for name, text in (
        ("systemctl", 'case "$1" in is-enabled) echo enabled ;; *) echo inactive; exit 3 ;; esac'),
        ("apt-mark", "echo linux-image-amd64; echo foo"),
        # What is on the disk when the file gets its name.
        ("sync", f'cat "$1" > {tmp_path}/synced; [ ! -e {tmp_path}/var/before ]'),
    ):
        program(tmp_path / "bin" / name, text)
    text_file(tmp_path / "etc/dnf/plugins/versionlock.list", "\n# Added lock on Sun\nkernel-0:5.14.0-427.el9.*\n")
    file, path = tmp_path / "var/before", f"{tmp_path}/bin:/usr/bin:/bin"
    sh(original_state._RECORD, "irqbalance.service", tmp_path, file, PATH=path)
    assert (tmp_path / "synced").read_text() == file.read_text()
    (device / "sriov_numvfs").write_text("7\n")
    sh(original_state._RECORD, "irqbalance.service", tmp_path, file, PATH=path)
    assert original_state.parse(file.read_text().splitlines()) == original_state.OriginalState(
        {"0000:21:00.0": original_state.OriginalVfs(3, True)},
        (True, False),
        frozenset({"linux-image-amd64", "foo", "kernel-0:5.14.0-427.el9.*"}),
        frozenset({"/etc/kubernetes"}),
    )
    now = sh(original_state.STATE + 'state "$1" "$2"', "irqbalance.service", tmp_path, PATH=path)
    assert original_state.parse(now).vfs == {"0000:21:00.0": original_state.OriginalVfs(7, True)}
