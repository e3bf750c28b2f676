"""Public reports of updates that replace parts of NVIDIA's driver, or what its modules were built with.

For the former apt itself answers, from a repository in a folder.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tasks.drivers import gpu_driver
from tasks.packages.dkms import NewerInput
from tests.deploy.conftest import Node, of
from tests.deploy.drivers.gpu_node import KERNEL, PREFIX, VERSION, there

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
        pytest.param("nvidia_peermem", True, True, id="nv_peer_memory-84"),
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
