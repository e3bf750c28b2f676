"""The persistence daemon of NVIDIA's driver."""

from pathlib import Path

from tasks.drivers import gpu_driver
from tasks.drivers.gpu_driver import services
from tests.deploy.conftest import Node, files
from tests.deploy.drivers.gpu_node import HEADER, IN_MEMORY, PREFIX, STALE, STATE, USERS, VERSION, due, there, wants
from tests.deploy.scripts import ran
from tests.stand_ins import program

# As in Ubuntu's nvidia-compute-utils-580.
COMMAND = "/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode --verbose"
UNIT_FILE = "--property=FragmentPath"
DROP_IN = (
    f"{HEADER}[Service]\nExecStart=\nExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --verbose\n"
)


def test_ubuntus_daemon_makes_the_gpus_persistent(node: Node) -> None:
    wants(node)
    static = {UNIT_FILE: [COMMAND], **there(), STATE: ["ActiveState=active LoadState=loaded UnitFileState=static "]}
    result = node.deploy(gpu_driver.install, static)
    *_, replaced = result.commands[f"{PREFIX}Persistence mode"]
    assert replaced.endswith(f" sh put {services.DROP_IN} -- nvidia-persistenced.service")
    assert "systemctl try-restart" in replaced
    assert DROP_IN.encode() in result.uploads.values()
    # A unit that a rule of udev's starts cannot be enabled.
    assert result.commands[f"{PREFIX}Persistence daemon"] == []
    assert node.deploy(gpu_driver.install, {**static, **files(**{services.DROP_IN: DROP_IN})}).flat == []


def test_a_daemon_that_could_not_start_again_before_a_reboot_is_not_restarted(node: Node) -> None:
    """Its program is of the new version, and the loaded modules, which jobs use, are of the old one."""
    wants(node)
    requested = due("gpu_driver", f"the driver {VERSION} is installed, and another is loaded and in use")
    old = there(STALE, **{IN_MEMORY: "570.86.15", USERS: ["python3 (4711)"]}, **requested)
    result = node.deploy(gpu_driver.install, {UNIT_FILE: [COMMAND], **old})
    assert not result.failed
    *_, replaced = result.commands[f"{PREFIX}Persistence mode"]
    assert "systemctl daemon-reload" in replaced
    assert "try-restart" not in replaced


def test_without_persistence_the_daemon_is_as_its_package_has_it(node: Node) -> None:
    wants(node, persistence=False)
    result = node.deploy(gpu_driver.install, {UNIT_FILE: [COMMAND], **there(), **files(**{services.DROP_IN: DROP_IN})})
    [removed] = result.commands[f"{PREFIX}Persistence mode"]
    assert removed.endswith(f" sh remove {services.DROP_IN} -- nvidia-persistenced.service")


def test_a_unit_that_makes_them_persistent_gets_no_drop_in(node: Node) -> None:
    wants(node)
    result = node.deploy(gpu_driver.install, {UNIT_FILE: ["/usr/bin/nvidia-persistenced --verbose"], **there()})
    assert result.flat == []


def test_a_fabric_manager_that_does_not_start_names_what_it_needs(node: Node, tmp_path: Path) -> None:
    wants(node, fabric_manager=True)
    answers = {**there(), STATE: ["ActiveState=inactive LoadState=loaded UnitFileState=disabled "]}
    [sent] = node.deploy(gpu_driver.install, answers).commands[f"{PREFIX}Fabric manager"]
    program(tmp_path / "systemctl", 'case "$1" in start) exit 1 ;; esac')
    program(tmp_path / "journalctl", "echo NV_WARN_NOTHING_TO_DO")
    done = ran(sent, tmp_path)
    assert done.returncode == 1
    assert "NV_WARN_NOTHING_TO_DO" in done.stderr
    assert "give fabric_manager False" in done.stderr
