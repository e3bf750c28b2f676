"""The persistence daemon of NVIDIA's driver."""

from pathlib import Path

from tasks.drivers.gpu_driver import services
from tests.deploy.conftest import Node, files
from tests.deploy.drivers.gpu_node import (
    HEADER,
    IN_MEMORY,
    PREFIX,
    STALE,
    STATE,
    USERS,
    VERSION,
    deploy,
    due,
    there,
)
from tests.deploy.scripts import ran
from tests.programs import failure
from tests.stand_ins import program

# As in Ubuntu's nvidia-compute-utils-580.
COMMAND = "/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode --verbose"
UNIT_FILE = "--property=FragmentPath"
DROP_IN = (
    f"{HEADER}[Service]\nExecStart=\nExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --verbose\n"
)


def test_ubuntus_daemon_makes_the_gpus_persistent(node: Node) -> None:
    static = {UNIT_FILE: [COMMAND], **there(), STATE: ["ActiveState=active LoadState=loaded UnitFileState=static "]}
    result = deploy(node, static)
    *_, replaced = result.commands[f"{PREFIX}Persistence mode"]
    assert replaced.endswith(f" sh put {services.DROP_IN} -- nvidia-persistenced.service")
    assert "systemctl try-restart" in replaced
    assert DROP_IN.encode() in result.uploads.values()
    # A unit that a rule of udev's starts cannot be enabled.
    assert result.commands[f"{PREFIX}Persistence daemon"] == []
    assert deploy(node, {**static, **files(**{services.DROP_IN: DROP_IN})}).flat == []


def test_a_daemon_that_could_not_start_again_before_a_reboot_is_not_restarted(node: Node) -> None:
    """Its program is of the new version, and the loaded modules, which jobs use, are of the old one."""
    requested = due("gpu_driver", f"the driver {VERSION} is installed, and another is loaded and in use")
    old = there(STALE, **{IN_MEMORY: "570.86.15", USERS: ["python3 (4711)"]}, **requested)
    result = deploy(node, {UNIT_FILE: [COMMAND], **old})
    assert not result.failed
    *_, replaced = result.commands[f"{PREFIX}Persistence mode"]
    assert "systemctl daemon-reload" in replaced
    assert "try-restart" not in replaced


def test_without_persistence_the_daemon_is_as_its_package_has_it(node: Node) -> None:
    result = deploy(node, {UNIT_FILE: [COMMAND], **there(), **files(**{services.DROP_IN: DROP_IN})}, persistence=False)
    [removed] = result.commands[f"{PREFIX}Persistence mode"]
    assert removed.endswith(f" sh remove {services.DROP_IN} -- nvidia-persistenced.service")


def test_a_unit_that_makes_them_persistent_gets_no_drop_in(node: Node) -> None:
    result = deploy(node, {UNIT_FILE: ["/usr/bin/nvidia-persistenced --verbose"], **there()})
    assert result.flat == []


def test_a_fabric_manager_that_does_not_start_names_what_it_needs(node: Node, tmp_path: Path) -> None:
    answers = {**there(), STATE: ["ActiveState=inactive LoadState=loaded UnitFileState=disabled "]}
    [sent] = deploy(node, answers, fabric_manager=True).commands[f"{PREFIX}Fabric manager"]
    program(tmp_path / "systemctl", 'case "$1" in start) exit 1 ;; esac')
    program(tmp_path / "journalctl", "echo NV_WARN_NOTHING_TO_DO")
    said = failure(ran(sent, tmp_path))
    assert "NV_WARN_NOTHING_TO_DO" in said
    assert "give fabric_manager False" in said
