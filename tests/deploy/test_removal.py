"""The removal of Trackbed from a node: its steps in their order. The lab compares a real node with its original state."""

import importlib
import json
import pkgutil
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import tasks
from agent.report.names import STATE_FOLDER as STATE
from agent.report.records import Change, Disruption, to_plain
from agent.spec.node import parse, spec_hash
from tasks import kubernetes, nccl, pull, reboot, removal
from tasks.agent import BASE
from tasks.common import lock
from tasks.common.archive import ROOT
from tasks.common.data import host_data
from tasks.common.status import SPEC
from tasks.common.texts import Present, Texts
from tasks.common.units import DropIns
from tasks.drivers.ofed import doca
from tasks.host.kernel_modules import PendingModules
from tasks.kubernetes import labels
from tasks.kubernetes.kubelet import Kubelet
from tasks.original_state import Current, Recorded
from tasks.packages import holds
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import (
    DEBIAN,
    LOSERS,
    PLAN,
    PYTHON,
    VERSIONS,
    Answers,
    Node,
    file_answers,
    file_lines,
    files,
    of,
)
from tests.deploy.scripts import sh
from tests.stand_ins import program

VFS = {"name": "rail0", "select": {"mac": "02:00:00:00:01:00"}, "mtu": 9000, "vfs": {"count": 7}}
PLAIN = {"name": "rail1", "select": {"pci": "0000:41:00.0"}, "mtu": 9000}
GIVEN = json.dumps({"node_name": "node-a", "nics": [VFS, PLAIN], "sysctls": {"vm.swappiness": "0"}})
EMPTY = {
    "node_name": "node-a",
    "irqs": {"irqbalance": "untouched", "pin": False},
    "rps": {"enable": False},
    "xps": {"enable": False},
}
WITHOUT_VFS = {
    **{"name": "rail0", "select": VFS["select"], "required": False},
    "vfs": {"count": 0, "derive_macs": False, "derive_guids": False},
}
COUNT = Change("vfs", "0000:21:00.0", "count", 7, 0, Disruption.VF_RESET)
NOTED_BEFORE = of(Recorded)
NEW_SPEC = "/etc/trackbed/.node.json.new"
PRESENT = of(Current)


def withdraw() -> None:
    removal.withdraw_spec(node_name="node-a")


def restore_vfs() -> None:
    removal.restore_values(name="VFs", node_name="node-a", vfs=True, timeout=7)


def remove() -> None:
    runpy.run_path(str(ROOT / "deploys/remove.py"))


def spec(text: str) -> Answers:
    return file_answers(SPEC, text)


def planned(*changes: Change) -> Answers:
    """The answers of a node whose agent has made this plan."""
    document = json.dumps({"changes": to_plain(changes), "errors": []})
    plan = {PLAN: ["1.0", document, "2" if changes else "0"]}
    return {**plan, VERSIONS: ["current 1.0"], PYTHON: "/usr/bin/python3"}


def test_the_vfs_are_restored_before_all_other_values(node: Node) -> None:
    result = node.deploy(withdraw, {**spec(GIVEN), NOTED_BEFORE: ["here", "vfs 0000:21:00.0 0 1"]}, ready_timeout=7)
    vfs, rest = result.commands["Spec withdrawn | VFs"], result.commands["Spec withdrawn | All other values"]
    assert vfs[1] == rest[1] == f"upload {NEW_SPEC}"
    hashes = [spec_hash(parse(json.dumps(each), "")) for each in ({**EMPTY, "nics": [WITHOUT_VFS]}, EMPTY)]
    assert [commands[2].rpartition(" sh ")[2] for commands in (vfs, rest)] == [
        f"put {SPEC} -- /usr/local/bin/trackbed {each} 7 trackbed.service" for each in hashes
    ]
    assert json.loads(result.uploads[NEW_SPEC]) == EMPTY


def test_the_original_number_of_vfs_is_restored(node: Node) -> None:
    before = {NOTED_BEFORE: ["here", "vfs 0000:21:00.0 4 1", "vfs 0000:41:00.0 0 1"]}
    result = node.deploy(restore_vfs, {**spec(GIVEN), **planned(COUNT), **before})
    wanted = json.loads(result.uploads[NEW_SPEC])["nics"]
    assert [(nic["select"], nic["vfs"]["count"]) for nic in wanted] == [({"pci": "0000:21:00.0"}, 4)]


def test_vfs_of_an_entry_with_each_go_from_however_many_functions_there_are(node: Node) -> None:
    select = {"vendor": "15b3", "each": True, "min": 8, "max": 8, "without": ["storage"]}
    rails = {"name": "rail{index}", "select": select, "vfs": {"count": 8}}
    storage = {"name": "storage", "select": {"mac": "02:00:00:00:01:00"}, "mtu": 9000}
    given = json.dumps({"node_name": "node-a", "nics": [rails, storage]})

    result = node.deploy(restore_vfs, {**spec(given), NOTED_BEFORE: ["here"]})
    wanted = json.loads(result.uploads[NEW_SPEC])["nics"]
    assert [(nic["name"], nic["select"]) for nic in wanted] == [
        ("rail{index}", {"vendor": "15b3", "each": True, "without": ["storage"]}),
        ("storage", storage["select"]),
    ]
    assert [nic.get("vfs", {}).get("count") for nic in wanted] == [0, None]


def test_a_spec_without_settings_is_left_alone(node: Node) -> None:
    result = node.deploy(withdraw, spec(json.dumps(EMPTY)))
    assert result.flat == []
    assert node.deploy(withdraw, {}).flat == []


@pytest.mark.parametrize(("nics", "unfinished"), [([WITHOUT_VFS], "VFs"), ([], "All other values")])
def test_a_removal_that_was_interrupted_waits_again_for_what_is_left(
    node: Node, nics: list[dict[str, Any]], unfinished: str
) -> None:
    there = {**spec(json.dumps({**EMPTY, "nics": nics})), NOTED_BEFORE: ["here"]}
    node.data = {"ready_timeout": 7}
    result = node.deploy(withdraw, {**there, **planned(COUNT)})
    assert result.commands[f"Spec withdrawn | {unfinished}"][2].endswith(" 7 trackbed.service")
    result = node.deploy(withdraw, {**there, **planned()})
    assert result.commands[f"Spec withdrawn | {unfinished}"] == []


def test_a_spec_that_cannot_be_read_is_refused(node: Node) -> None:
    result = node.deploy(withdraw, spec('{"node_name": "node-a", "nicks": []}'))
    assert "deploy once more, then remove" in result.refusal


def test_state_that_the_agent_does_not_keep_is_restored(node: Node) -> None:
    was = ["here", "vfs 0000:21:00.0 0 1", "irqbalance enabled active", "held mine"]
    held = ("mine", "set-by-another-since", "linux-image-amd64")
    now = ["vfs 0000:21:00.0 0 0", "irqbalance disabled inactive", *(f"held {name}" for name in held)]
    noted = {of(Texts): [f"file {holds.PATH}", ":linux-image-amd64", ":linux-headers-amd64"]}
    requests = {of(NodeRebootRequests): ["boot-1", "boot-former boot-1 kernel arguments iommu=pt are still in effect "]}
    there = {of(Present): [BASE]}
    result = node.deploy(removal.remove_all, {NOTED_BEFORE: was, PRESENT: now, **requests, **there, **noted, **DEBIAN})
    enabled, started, probed, released = result.commands["Removal | Original state restored"]
    assert enabled.endswith("""systemctl enable --quiet "$1"\n' sh irqbalance.service""")
    assert started == "systemctl start irqbalance.service"
    assert probed.endswith("sh /sys/bus/pci/devices/0000:21:00.0/sriov_drivers_autoprobe")
    assert released.endswith("sh apt-mark unhold linux-image-amd64")
    assert len(result.commands["Removal | Agent and state"]) == 1
    assert any("at its next boot: boot-former: " in line for line in result.log)


def test_a_node_that_an_interrupted_deploy_has_cordoned_is_named(node: Node) -> None:
    there = {of(Present): [BASE], of(NodeRebootRequests): ["boot-1", "drained"]}
    message = "the Node stays cordoned, as a deploy has left it for a reboot; bring it back by `kubectl uncordon`"
    assert any(message in line for line in node.deploy(removal.remove, there).log)
    assert not any(message in line for line in node.deploy(removal.remove, {of(Present): [BASE]}).log)


def test_a_hold_that_an_interrupted_deploy_set_is_released(node: Node) -> None:
    present = {NOTED_BEFORE: ["here"], PRESENT: ["held mine", "held ours"], **DEBIAN}
    before = {**present, **files(**{holds.BEFORE: "mine\n"})}
    later = {**before, **files(**{holds.BEFORE: "", holds.PATH: "ours\n"})}
    result = node.deploy(removal.restore_original_state, before, later)
    noted, released = result.flat
    assert noted.endswith(f" sh {holds.PATH}")
    assert released.endswith(" sh apt-mark unhold ours")


def test_folders_that_trackbed_created_are_removed_and_others_stay(node: Node) -> None:
    nfd = str(Path(labels.NFD).parent)
    there = {NOTED_BEFORE: ["here", "folder /etc/kubernetes"], of(Present): [BASE]}
    (last,) = node.deploy(removal.remove, there).flat
    folders = last.rpartition(" -- ")[2].split()
    assert folders.index(nfd) < folders.index(str(Path(nfd).parent))
    assert "/etc/kubernetes" not in folders


def test_an_empty_folder_is_removed_and_one_with_files_is_not(tmp_path: Path) -> None:
    program(tmp_path / "bin/systemctl", '[ "$1" != cat ]')
    for name in ("made/deep", "full"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("full/other", "ours"):
        (tmp_path / name).write_text("")
    folders = [tmp_path / name for name in ("made/deep", "made", "full")]
    script = removal._REMOVE.replace("/run/trackbed", f"{tmp_path}/run").replace("/etc/", f"{tmp_path}/etc/")
    base = [tmp_path / name for name in ("base", "state", "reporter")]
    sh(script, *base, tmp_path / "ours", "--", *folders, PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "ours").exists()
    assert (tmp_path / "full/other").exists()


def test_a_node_without_files_of_trackbed_is_left_alone(node: Node) -> None:
    assert node.deploy(removal.remove_all, {}).did_nothing


def test_trackbed_stays_while_something_that_needs_it_waits_for_a_reload_that_would_take_gpus(node: Node) -> None:
    """The kubelet's gate runs the agent's command: without the command the kubelet would not start at the next boot."""
    gate = {of(DropIns): file_lines({Kubelet("hold").drop_in: Kubelet("hold").text})}
    there = {**spec(GIVEN), **gate, of(Present): [BASE], NOTED_BEFORE: ["here", "irqbalance enabled active"]}
    present = {**there, PRESENT: ["irqbalance disabled inactive"]}
    losers = {LOSERS: ["docker-a.scope"]}
    for answers, later in (({**present, **losers}, None), (present, {**present, **losers})):
        result = node.deploy(remove, answers, later)
        assert result.failed
        commands = "\n".join(result.flat)
        assert not any(word in commands for word in ("daemon-reload", "systemctl enable", "disable"))
        assert any("Trackbed is not removed: " in line and "docker-a.scope" in line for line in result.errors)
    result = node.deploy(remove, present)
    assert not result.failed


def test_the_keys_of_all_tasks_are_removed(node: Node) -> None:
    data: dict[str, object] = {}

    def code() -> None:
        removal.clear_keys()
        data.update(host_data())
        data["policy"] = reboot.POLICY.here().policy

    node.deploy(code, {}, reboot={"policy": "allow"}, kernel_modules=["igbvf"], ready_timeout=7, site_rack="a")
    assert (data["reboot"], data["kernel_modules"], data["policy"]) == (None, (), "never")
    assert (data["ready_timeout"], data["site_rack"]) == (7, "a")


@pytest.mark.parametrize(
    ("plan", "code", "message"), [("exit 0", 0, ""), ("echo 'vfs 7 -> 0'; exit 2", 1, "vfs 7 -> 0")]
)
def test_the_removal_waits_until_the_plan_is_empty(tmp_path: Path, plan: str, code: int, message: str) -> None:
    program(tmp_path / "systemctl", f'echo "$*" >> {tmp_path}/did')
    program(tmp_path / "trackbed", f'case "$1" in wait) echo not ready; exit 1 ;; plan) {plan} ;; esac')
    arguments = (tmp_path / "trackbed", "hash", "0", "trackbed.service")
    path = f"{tmp_path}:/usr/bin:/bin"
    if code:
        with pytest.raises(AssertionError, match=rf"not ready\s+{message}\s+not restored after 0 s"):
            sh(removal._RESTORE_VALUES, *arguments, PATH=path)
    else:
        sh(removal._RESTORE_VALUES, *arguments, PATH=path)
    assert (tmp_path / "did").read_text() == "reload-or-restart trackbed.service\n"


def named_paths() -> set[str]:
    """The files of ours that the modules of tasks/ name."""
    modules = [importlib.import_module(module.name) for module in pkgutil.walk_packages(tasks.__path__, "tasks.")]
    values = [value for module in modules for name, value in vars(module).items() if not name.startswith("_")]
    named = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
    return {one for one in named if isinstance(one, str) and re.fullmatch(r"/(etc|usr|var|opt)/\S*trackbed\S*", one)}


def test_each_file_that_a_task_names_is_looked_for(node: Node) -> None:
    # Each deploy removes its lock itself.
    named = named_paths() - {lock.FILE}
    assert {kubernetes.SECRET, pull.PROGRAM, labels.NFD, doca.PREFERENCES} <= named
    there = {of(Present): [BASE]}
    result = node.deploy(remove, {**spec(GIVEN), **there})
    assert not result.failed
    message = "\n".join(result.ran)
    assert [path for path in sorted(named) if path not in message and not path.startswith((BASE, f"{STATE}/"))] == []
    assert nccl.PATH in message


def test_the_removal_has_its_order_and_writes_and_loads_nothing_that_a_deploy_does_by_default(node: Node) -> None:
    result = node.deploy(remove, {**spec(GIVEN), of(PendingModules): ["ib_umad"]}, ready_timeout=7)
    order = list(result.planned)
    assert order[:2] == ["Pull | No timer", "Spec withdrawn | VFs"]
    # The initramfs is made again without the modules' options.
    assert order.index("Kernel module options") < order.index("Boot | Initramfs")
    # The time limit of the inventory applies to the restoring.
    assert " 7 trackbed.service" in result.commands["Spec withdrawn | VFs"][2]
    assert [*result.uploads] == [NEW_SPEC]
    assert not any("modprobe -- " in command for command in result.flat)
