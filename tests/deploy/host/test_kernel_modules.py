import re
import runpy
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tasks.common.archive import ROOT
from tasks.common.commands import script
from tasks.common.texts import Present
from tasks.drivers import erdma, gpu_driver
from tasks.host import kernel_modules
from tasks.host.kernel_modules import PendingModules
from tasks.packages import signatures
from tasks.packages.dkms import RunningKernel
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import DEBIAN, Node, file_answers, of
from tests.deploy.scripts import ran, sh
from tests.programs import failure
from tests.stand_ins import program, text_file

PENDING = of(PendingModules)
BOOT = "# Written by Trackbed; changes here are overwritten.\nib_umad\nrdma_ucm\n"
OPTIONS = "# Written by Trackbed; changes here are overwritten.\noptions erdma compat_mode=N\n"


def both() -> None:
    kernel_modules.set_options()
    kernel_modules.configure()


def load(module: str) -> str:
    return str(script(kernel_modules._LOAD, module))


def test_a_fresh_node_gets_the_files_and_loads_the_modules_that_are_not_loaded(node: Node) -> None:
    node.data = {"kernel_modules": ["ib_umad", "rdma_ucm"], "kernel_module_options": {"erdma": {"compat_mode": False}}}
    result = node.deploy(both, {PENDING: ["rdma_ucm"]})
    assert result.uploads == {kernel_modules.OPTIONS: OPTIONS.encode(), kernel_modules.AT_BOOT: BOOT.encode()}
    assert result.commands["Kernel modules now"] == [load("rdma_ucm")]
    assert list(result.commands) == ["Kernel module options", "Kernel modules at boot", "Kernel modules now"]


def test_nothing_is_done_if_all_is_in_place(node: Node) -> None:
    node.data = {"kernel_modules": ["ib_umad", "rdma_ucm"], "kernel_module_options": {"erdma": {"compat_mode": False}}}
    there = file_answers(kernel_modules.AT_BOOT, BOOT) | file_answers(kernel_modules.OPTIONS, OPTIONS)
    assert node.deploy(both, there).did_nothing


def test_a_module_that_the_running_kernel_lacks_waits_for_the_next_one(node: Node) -> None:
    node.data = {"kernel_modules": ["ib_umad"], "kernel": {"release": "6.1.0-10-amd64"}}
    result = node.deploy(kernel_modules.configure, {PENDING: "ib_umad", "uname -r": "6.1.0-10-cloud-amd64"})
    [loaded] = result.commands["Kernel modules now"]
    assert loaded.endswith(" sh ib_umad") and "|| echo" in loaded
    result = node.deploy(kernel_modules.configure, {PENDING: "ib_umad", "uname -r": "6.1.0-10-amd64"})
    assert result.commands["Kernel modules now"] == [load("ib_umad")]


@pytest.mark.parametrize(
    ("asked", "waits"),
    [("ofed boot-1", True), ("gpu_driver boot-1", True), ("ofed boot-0", False), ("firmware boot-1", False)],
)
def test_a_module_that_does_not_fit_the_drivers_waits_for_the_reboot(node: Node, asked: str, waits: bool) -> None:
    """OFED's ib_umad does not load beside the kernel's own ib_core; if that failed the host, the reboot would never come."""
    node.data = {"kernel_modules": ["ib_umad"], "reboot": {"policy": "allow"}}
    requests = {of(NodeRebootRequests): ["boot-1", f"{asked} installed modules are not the loaded ones "]}
    [command] = node.deploy(kernel_modules.configure, {PENDING: "ib_umad", **requests}).commands["Kernel modules now"]
    assert ("|| echo" in command) is waits
    assert (command == load("ib_umad")) is not waits


# As libkmod's own words are (kmod 30).
WARNED = "echo \"libkmod: ERROR kmod_config_parse: /etc/modprobe.d/a.conf line 1: ignoring bad line starting with 'foo'\" >&2"


@pytest.mark.parametrize(
    ("modprobe", "pending"),
    [(":", False), (WARNED, False), ("echo insmod /lib/modules/ib_umad.ko", True), (f"{WARNED}; exit 1", True)],
)
def test_a_module_is_pending_if_modprobe_would_load_it_whatever_it_says_of_its_files(
    tmp_path: Path, modprobe: str, pending: bool
) -> None:
    program(tmp_path / "modprobe", modprobe)
    assert sh(kernel_modules._PENDING, "ib_umad", programs=tmp_path) == ["ib_umad"] * pending


@pytest.mark.parametrize(
    ("known", "said"),
    [pytest.param(1, "the kernel 6.8.0-9-kvm has no module ib_umad; install the", id="k3s-ansible-419"), (0, "")],
)
def test_the_package_that_may_have_a_missing_module_is_named(tmp_path: Path, known: int, said: str) -> None:
    for name, text in {"modprobe": "exit 1", "modinfo": f"exit {known}", "uname": "echo 6.8.0-9-kvm"}.items():
        program(tmp_path / name, text)
    message = failure(ran(load("ib_umad"), tmp_path))
    assert said in message
    for package in ("linux-modules-extra-6.8.0-9-kvm on Ubuntu", "kernel-modules-extra-6.8.0-9-kvm on RHEL"):
        assert bool(said) == (package in message)


@pytest.mark.parametrize(
    ("line", "code"),
    [pytest.param("install /bin/true", 0, id="lisa-4106"), pytest.param("install /bin/false", 1, id="kmod-440")],
)
def test_a_line_by_which_modprobe_loads_nothing_is_named(tmp_path: Path, line: str, code: int) -> None:
    program(tmp_path / "modprobe", f'case $1 in --dry-run) echo "{line}" ;; *) exit {code} ;; esac')
    said = failure(ran(load("ib_umad"), tmp_path))
    assert "a line `install ib_umad` in /etc/modprobe.d keeps modprobe from loading it; remove that line" in said


def test_a_kernel_that_loads_no_more_modules_is_named(tmp_path: Path) -> None:
    program(tmp_path / "bin/modprobe", "case $1 in --dry-run) echo insmod /lib/modules/x.ko ;; *) exit 1 ;; esac")
    text_file(tmp_path / "proc/sys/kernel/modules_disabled", "1\n")
    said = failure(ran(load("ib_umad"), tmp_path / "bin", MACHINE=str(tmp_path)))
    assert "the kernel loads no more modules in this boot (kernel.modules_disabled); reboot, so" in said
    # Packages of drivers are not replaced either: with the programs of another version, the loaded ones would not work.
    assert sh(signatures._REFUSED, MACHINE=str(tmp_path)) == [signatures._NO_MORE]


def test_an_initramfs_that_dracut_makes_for_any_host_has_the_files_of_modprobe_too(node: Node) -> None:
    """Without its option hostonly, as images for clouds have it, dracut leaves out /etc/modprobe.d (80base/module-setup.sh)."""
    node.data = {"gpu_driver": {"version": "580.95.05"}}
    assert node.deploy(kernel_modules.set_options, {}).uploads == {}
    made = node.deploy(kernel_modules.set_options, {of(Present): [kernel_modules.DRACUT]})
    [(path, text)] = made.uploads.items()
    [items] = re.findall(r'^install_optional_items\+=" (.*) "$', text.decode(), re.MULTILINE)
    assert path.startswith("/etc/dracut.conf.d/") and path in kernel_modules.LEFTOVERS
    files = [kernel_modules.OPTIONS, gpu_driver.BLACKLIST, erdma.OPTIONS]
    assert [file for file in files if not fnmatch(file, items)] == []


def test_what_left_the_inventory_leaves_the_node(node: Node) -> None:
    there = file_answers(kernel_modules.AT_BOOT, BOOT)
    result = node.deploy(kernel_modules.configure, there, kernel_modules=[])
    assert result.commands["Kernel modules at boot"] == [f"rm -f {kernel_modules.AT_BOOT}"]
    assert result.commands["Kernel modules now"] == []


def test_the_options_are_there_before_anything_loads_a_driver_or_makes_an_initramfs(node: Node) -> None:
    """A module reads its options when it is loaded."""
    node.data = {
        "kernel": {"release": "6.1.0-9-amd64"},
        "gpu_driver": {"version": "580.95.05"},
        "kernel_module_options": {"nvidia": {"NVreg_RestrictProfilingToAdminUsers": 0}},
    }
    answers = {**DEBIAN, of(RunningKernel): "6.1.0-9-amd64", "uname -m": "x86_64"}
    order = list(node.deploy(lambda: runpy.run_path(str(ROOT / "deploy.py")), answers).planned)
    options = order.index("Kernel module options")
    assert options < order.index("Kernel | Kernel and headers")
    assert options < order.index("GPU driver | Packages")
