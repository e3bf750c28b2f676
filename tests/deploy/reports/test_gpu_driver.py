"""Public reports of NVIDIA's driver: what replaces a part of it, who keeps it loaded, and what nvidia-smi says.

Where an update replaces parts, apt itself answers, from a repository in a folder.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tasks.drivers import gpu_driver
from tasks.drivers.gpu_driver import modules
from tasks.packages.dkms import NewerInput
from tests.deploy.conftest import Node, of
from tests.deploy.drivers.gpu_node import KERNEL, PREFIX, SMI, VERSION, deploy, there
from tests.deploy.scripts import sh
from tests.stand_ins import program, text_file

OLD, NEW = "580.95.05", "580.126.09"
ENTRY = "Package: {}\nVersion: {}-{}\nArchitecture: all\nFilename: ./{}_{}.deb\nSize: 1\nSHA256: {}\n\n"


def candidates(root: Path, names: tuple[str, ...], revision: str) -> dict[str, str]:
    """The versions that an update would install, of packages of which the repository has the driver's and a newer one."""
    for folder in ("repo", "state/lists/partial", "cache/archives/partial", "etc/preferences.d"):
        (root / folder).mkdir(parents=True)
    (root / "repo/Packages").write_text(
        "".join(ENTRY.format(name, each, revision, name, each, "0" * 64) for name in names for each in (OLD, NEW))
    )
    (root / "etc/sources.list").write_text(f"deb [trusted=yes] file:{root}/repo ./\n")
    (root / "etc/preferences.d/trackbed").write_text(gpu_driver.preferences(OLD))
    (root / "state/status").write_text("")
    settings: dict[str, object] = {
        "Dir::Etc": root / "etc",
        "Dir::State": root / "state",
        "Dir::State::status": root / "state/status",
    }
    settings |= {"Dir::Cache": root / "cache", "APT::Sandbox::User": "", "Dir::Etc::sourceparts": "-"}
    options = [f"-o{name}={value}" for name, value in settings.items()]
    subprocess.run(["apt-get", "-qq", *options, "update"], check=True, capture_output=True)
    shown = subprocess.run(["apt-cache", *options, "policy", *names], check=True, capture_output=True, text=True)
    lines = [line.strip() for line in shown.stdout.splitlines()]
    found = [line.partition(": ")[2] for line in lines if line.startswith("Candidate")]
    return dict(zip(names, found, strict=True))


@pytest.mark.skipif(shutil.which("apt-cache") is None, reason="this machine has no apt")
@pytest.mark.parametrize(
    ("names", "revision"),
    [
        pytest.param(
            ("nvidia-headless-580-server", "nvidia-utils-580-server"), "0ubuntu0.22.04.1", id="kubespray-8540"
        ),
        pytest.param(
            ("nvidia-headless-580", "libnvidia-compute-580", "cuda-drivers-580", "xserver-xorg-video-nvidia-580"),
            "0ubuntu1",
            id="homelab-4110",
        ),
        pytest.param(("libnvidia-common-580", "libnvidia-gl-580"), "0ubuntu0.20.04.2", id="shine-cluster-50"),
        pytest.param(("nvidia-fabricmanager", "libnvidia-nscq"), "1", id="gpu-operator-544"),
        pytest.param(("cuda-drivers", "nvidia-driver-580"), "1", id="ansible-role-nvidia-driver-11"),
        pytest.param(("nvidia-open", "nvidia-kernel-open-dkms", "libcuda1"), "1", id="machine-shop-maintenance-70"),
    ],
)
def test_an_update_leaves_each_part_of_the_driver_at_its_version(
    tmp_path: Path, names: tuple[str, ...], revision: str
) -> None:
    assert candidates(tmp_path, names, revision) == dict.fromkeys(names, f"{OLD}-{revision}")


@pytest.mark.parametrize(
    ("method", "newer", "again"),
    [
        pytest.param("nvidia_peermem", True, True, id="gpu-operator-2868"),
        pytest.param("nvidia_peermem", False, False, id="older OFED"),
        pytest.param("dma-buf", True, False, id="dma-buf"),
    ],
)
def test_after_another_ofed_the_driver_is_built_again_for_its_peer_memory(
    node: Node, method: str, newer: bool, again: bool
) -> None:
    node.data = {"gpu_driver": {"version": VERSION}, "peer_memory": {"method": method}}
    symbols = ["/usr/src/ofa_kernel/default/Module.symvers"] * newer
    result = node.deploy(gpu_driver.install, {of(NewerInput, "nvidia_peermem", KERNEL): symbols, **there()})
    built = result.commands[f"{PREFIX}Modules for the running kernel"]
    assert [command.endswith(f" nvidia {VERSION} {KERNEL} again") for command in built] == [True] * again


@pytest.mark.parametrize(
    ("name", "cgroup", "counts"),
    [
        pytest.param("nv-hostengine", "0::/system.slice/nvidia-dcgm.service", False, id="puppet-magic_castle-438"),
        pytest.param("nv-hostengine", "3:cpu:/\n1:name=systemd:/system.slice/dcgm.service", False, id="deepops-909"),
        pytest.param("nvidia-imex", "0::/system.slice/nvidia-imex.service", False, id="lisa-2843"),
        ("nv-hostengine", "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope", True),
        ("nvidia-persiste", "0::/system.slice/docker-1.scope", True),
    ],
)
def test_services_of_the_host_that_watch_gpus_do_not_keep_the_driver(
    tmp_path: Path, name: str, cgroup: str, counts: bool
) -> None:
    opened = tmp_path / "proc/9/fd"
    opened.mkdir(parents=True)
    (opened / "3").symlink_to("/dev/nvidiactl")
    (opened.parent / "comm").write_text(f"{name}\n")
    (opened.parent / "cgroup").write_text(f"{cgroup}\n")
    assert sh(modules._USERS, tmp_path) == [f"{name} (9)"] * counts
    # They are stopped before the modules are unloaded, and run again.
    for each in ("rmmod", "modprobe", "dmesg"):
        program(tmp_path / "bin" / each, f'echo "{each} $*" >> {tmp_path}/log')
    unit = cgroup.rpartition("/")[2].removesuffix(".service")
    shown = f'[ "$*" = "--quiet is-active {unit}" ] || [ "$1" != --quiet ]'
    program(tmp_path / "bin/systemctl", f'{shown} || exit 3; [ "$1" = --quiet ] || echo "$*" >> {tmp_path}/log')
    sh(modules._LOAD, "yes", "remedy", programs=tmp_path / "bin")
    calls = (tmp_path / "log").read_text().splitlines()
    assert (calls[0] == f"stop {unit}", calls[-1] == f"start {unit}") == (not counts, not counts)


def test_a_gpu_whose_inforom_is_corrupted_is_a_warning(tmp_path: Path, node: Node) -> None:
    corrupted = "WARNING: infoROM is corrupted at gpu 0000:0B:00.0"
    program(tmp_path / "nvidia-smi", f"case $1 in -q) ;; *) echo {VERSION}; echo '{corrupted}'; exit 14 ;; esac")
    result = deploy(node, {**there(), SMI: sh(gpu_driver._CHECK, programs=tmp_path)})
    assert not result.failed, result.errors
    assert any(f"nvidia-smi says: {corrupted}" in line for line in result.log)


def test_an_nvidia_smi_that_hangs_is_named(tmp_path: Path, node: Node) -> None:
    program(tmp_path / "timeout", "exit 124")
    program(tmp_path / "nvidia-smi")
    result = deploy(node, {**there(), SMI: sh(gpu_driver._CHECK, programs=tmp_path)})
    (error,) = [line for line in result.errors if "nvidia-smi" in line]
    assert "says: no answer within 120 s; look at the kernel log" in error


FAILED = "[  903.609564] NVRM: RmInitAdapter: Cannot initialize GSP firmware RM"


def gpu(root: Path, number: int, driver: str = "nvidia", vf: bool = False) -> None:
    device = root / f"sys/bus/pci/devices/0000:{number}8:00.0"
    text_file(device / "vendor", "0x10de\n")
    (device / "class").write_text("0x030200\n")
    (device / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
    if vf:
        (device / "physfn").symlink_to("../0000:18:00.0")


@pytest.mark.parametrize(
    ("smi", "said"),
    [
        pytest.param(f"echo {VERSION}; echo {VERSION}", "nvidia-smi shows 2 of 3 GPUs that the driver has", id="nvtrust-128"),
        pytest.param(
            "echo No devices were found; exit 6", "says: No devices were found", id="open-gpu-kernel-modules-789"
        ),
        pytest.param(
            "echo Unable to determine the device handle for GPU 0000:D8:00.0: Not Found; exit 9",
            "says: Unable to determine the device handle", id="open-gpu-kernel-modules-259",
        ),
    ],
)  # fmt: skip
def test_gpus_that_the_driver_cannot_initialise_are_named_with_the_kernels_messages(
    tmp_path: Path, node: Node, smi: str, said: str
) -> None:
    for number in (1, 2, 3):
        gpu(tmp_path, number)
    gpu(tmp_path, 4, "vfio-pci")
    gpu(tmp_path, 5, vf=True)
    program(tmp_path / "bin/nvidia-smi", f"case $1 in -q) ;; *) {smi} ;; esac")
    program(tmp_path / "bin/dmesg", f"echo '{FAILED}'; echo '[  904.0] mlx5_core: other'")
    printed = sh(gpu_driver._CHECK, tmp_path, programs=tmp_path / "bin")
    result = deploy(node, {**there(), SMI: printed})
    (error,) = [line for line in result.errors if "nvidia-smi" in line]
    assert said in error
    assert error.endswith(
        "; the kernel's last messages of the driver: NVRM: RmInitAdapter: Cannot initialize GSP firmware RM"
    )


def test_gpus_that_are_all_shown_need_no_message(tmp_path: Path) -> None:
    gpu(tmp_path, 1)
    gpu(tmp_path, 2, vf=True)
    program(tmp_path / "bin/nvidia-smi", f"case $1 in -q) ;; *) echo {VERSION} ;; esac")
    assert sh(gpu_driver._CHECK, tmp_path, programs=tmp_path / "bin") == [f"version {VERSION}"]
