"""Software that was installed past the package manager is not mixed with packages of it."""

import os
from pathlib import Path

import pytest

from tasks import packages
from tasks.common.texts import Present
from tasks.containers import container_engine, container_runtime, engine_files
from tasks.drivers import gpu_driver
from tests.deploy.conftest import DEBIAN, ROCKY_9, Node, of
from tests.deploy.drivers import gpu_node
from tests.deploy.scripts import sh
from tests.stand_ins import program


def test_a_driver_of_nvidias_installer_is_named_before_packages_are_installed(node: Node) -> None:
    gpu_node.wants(node)
    there = {of(Present): gpu_driver.RUN_FILE}
    result = node.deploy(gpu_driver.install, {**there, **gpu_node.fresh(DEBIAN)})
    assert result.failed and not result.uploads
    assert result.flat[0].startswith("refuse: gpu_driver: ") and "installer (.run)" in result.flat[0]
    # Where the packages are installed already, nothing would be mixed.
    settled = node.deploy(gpu_driver.install, {**there, **gpu_node.there(), **gpu_node.debs(gpu_node.VERSION)})
    assert not any("installer (.run)" in command for command in settled.flat)


def test_a_docker_that_is_a_snap_is_named_before_packages_are_installed(node: Node) -> None:
    there = {of(Present): "/snap/docker/current"}
    result = node.deploy(container_engine.install, {**DEBIAN, **there}, container_engine={"name": "docker"})
    assert "the node has docker as a snap" in result.flat[0] and "snap remove docker" in result.refusal
    node.data = {"container_engine": {"name": "containerd"}}
    assert "snap remove" not in "\n".join(node.deploy(container_engine.install, {**DEBIAN, **there}).flat)


def test_a_node_whose_system_is_an_image_is_not_supported(node: Node) -> None:
    result = node.deploy(packages.system, {**ROCKY_9, of(Present): packages.OSTREE})
    assert "the node boots an image (rpm-ostree" in result.errors[0]
    assert not node.deploy(packages.system, ROCKY_9).failed


def test_a_link_counts_also_if_it_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("/nowhere")
    text = str(Present().command((str(tmp_path / "current"), str(tmp_path / "absent"))))
    assert os.popen(text).read().split() == [str(tmp_path / "current")]  # noqa: S605  the fact's own command


@pytest.mark.parametrize(
    ("engine", "fault"),
    [("docker", "it is a snap, which does not read"), ("containerd", "has no containerd of its own;")],
)
def test_the_toolkit_is_not_configured_in_files_that_nobody_reads(tmp_path: Path, engine: str, fault: str) -> None:
    (tmp_path / "snap/docker/current").mkdir(parents=True)
    for name in ("nvidia-ctk", "jq", "systemctl"):
        program(tmp_path / "bin" / name)
    for name in ("sh", "dirname", "sed", "head"):
        (tmp_path / "bin" / name).symlink_to(f"/bin/{name}")
    text = container_runtime.SCRIPT.replace("for snaps in /snap ", f"for snaps in {tmp_path}/snap ")
    # No other program is found: the login's PATH ends with the folder, and so does the script's.
    done = sh(f"PATH={tmp_path}/bin\n{text}", "dry-run", engine, "no", "no")
    [said] = engine_files.parse(done).faults
    assert said.startswith(f"{engine}: ") and fault in said
