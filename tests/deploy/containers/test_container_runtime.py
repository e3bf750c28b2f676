import subprocess
from pathlib import Path
from typing import Any

import pytest

from tasks.common import units
from tasks.common.units import UnitStates
from tasks.containers import container_runtime
from tasks.packages.holds import HeldPackages
from tasks.packages.vendor_repository import KeyFingerprints
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import DEBIAN, ROCKY_9, Answers, Node, Result, file_answers, of
from tests.deploy.systems import dpkg
from tests.stand_ins import program

DRY_RUN = "sh dry-run "
SOURCE = """\
# Written by Trackbed; changes here are overwritten.
Types: deb
URIs: https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH)
Suites: /
Signed-By: /etc/apt/keyrings/trackbed-nvidia-container-toolkit.gpg
"""
ENDED = "ActiveState=inactive LoadState=loaded Result={} Type=oneshot "
FINGERPRINT = "C95B321B61E88C1809C4F759DDCAE044F796ECB0"


def installed(version: str = "1.20.1-1") -> Answers:
    return {
        **DEBIAN,
        **dpkg("gpg", *(f"{name}={version}" for name in container_runtime.PACKAGES)),
        of(HeldPackages): list(container_runtime.PACKAGES),
        of(KeyFingerprints): FINGERPRINT,
        **file_answers("/etc/apt/sources.list.d/trackbed-nvidia-container-toolkit.sources", SOURCE),
    }


def engines(node: Node, *names: str, **more: Any) -> None:
    node.data = {"container_runtime": {"engines": list(names), "version": "1.20.1-1", **more}}


def deploy(node: Node, answers: Answers, *names: str, **more: Any) -> Result:
    engines(node, *names, **more)
    return node.deploy(container_runtime.configure, answers)


def test_a_fresh_debian_gets_repository_packages_and_files(node: Node) -> None:
    # The dry run needs the toolkit. Until that is installed, a change is planned.
    engines(node, "containerd")
    later = {**installed("1.19.0-1"), DRY_RUN: ["ran", "change x"]}
    result = node.deploy(container_runtime.configure, DEBIAN, later)
    assert set(result.planned.values()) == {True}
    apt = result.commands["Container runtime | Packages"]
    assert apt[0].endswith(" ".join(["", *(f"{name}=1.20.1-1" for name in container_runtime.PACKAGES)]))
    assert apt[1].endswith(f" apt-mark hold {' '.join(container_runtime.PACKAGES)}")
    [applied] = result.commands["Container runtime | NVIDIA's runtime in containerd"]
    assert applied.startswith("unshare --mount sh -ec ")
    assert applied.endswith(" sh apply containerd yes no")


def test_a_fresh_rocky_gets_repository_packages_and_files(node: Node) -> None:
    node.data = {"container_runtime": {"engines": ["crio"]}}
    result = node.deploy(container_runtime.configure, ROCKY_9, {**ROCKY_9, DRY_RUN: ["ran", "change x"]})
    source = result.uploads["/etc/yum.repos.d/trackbed-nvidia-container-toolkit.repo"].decode()
    assert "baseurl=https://nvidia.github.io/libnvidia-container/stable/rpm/$basearch\n" in source
    assert "gpgcheck=0\nrepo_gpgcheck=1\n" in source
    [dnf] = result.commands["Container runtime | Packages"]
    assert dnf.endswith(" nvidia-container-toolkit")
    assert result.commands["Container runtime | NVIDIA's runtime in crio"][0].endswith(" sh apply crio yes no")


def test_nothing_is_done_if_all_is_in_place(node: Node) -> None:
    there = {
        **installed(),
        DRY_RUN: "ran",
        of(UnitStates): "ActiveState=active LoadState=loaded UnitFileState=enabled ",
    }
    assert deploy(node, there, "containerd", "docker", cdi=True).did_nothing


def test_an_operators_own_repository_replaces_nvidias(node: Node) -> None:
    engines(node, "containerd", repository={"uri": "http://mirror.example.net/ctk", "key": "http://mirror.example.net/key",
                                            "fingerprint": "0" * 40})  # fmt: skip
    result = node.deploy(container_runtime.configure, installed())
    [path] = [path for path in result.uploads if path.endswith(".sources")]
    assert "URIs: http://mirror.example.net/ctk\n" in result.uploads[path].decode()


def test_files_that_the_daemon_has_not_loaded_are_applied_again(node: Node) -> None:
    result = deploy(node, {**installed(), DRY_RUN: ["ran", "pending"]}, "docker", set_as_default=False)
    [applied] = result.flat
    assert applied.endswith(" sh apply docker no no")


def test_the_operator_s_settings_do_not_matter_if_nothing_changes(node: Node) -> None:
    output = ["ran", "lost runtimes.nvidia.runtimeArgs"]
    assert deploy(node, {**installed(), DRY_RUN: output}, "docker").flat == []


@pytest.mark.parametrize(
    ("output", "refused"),
    [
        ([], "containerd cannot be configured: the node has no nvidia-ctk or no jq; deploy again"),
        (["fault containerd: it cannot read (4, 1): x"], "containerd: it cannot read (4, 1)"),
        (["ran", "change a", "lost plugins.x.y"], "would change or remove your settings plugins.x.y"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(node: Node, output: list[str], refused: str) -> None:
    refusal = deploy(node, {**installed(), DRY_RUN: output}, "containerd").refusal
    assert refusal.startswith("refuse: container_runtime: ") and refused in refusal


def test_an_engine_that_does_not_run_gets_its_files_and_is_named(node: Node) -> None:
    stopped = ["ran", "change x", "warning docker is inactive: whether it"]
    result = deploy(node, {**installed(), DRY_RUN: stopped}, "docker")
    assert (result.failed, len(result.flat)) == (False, 1)
    [warning] = [line for line in result.log if "docker is inactive" in line]
    assert "container_runtime: " in warning


@pytest.mark.parametrize(
    ("path", "service", "enabled"),
    [
        ("disabled", "enabled", ["path"]),
        ("enabled", "disabled", ["service"]),
        ("disabled", "disabled", ["path", "service"]),
        ("enabled", "enabled", []),
    ],
)
def test_the_units_that_write_specifications_are_enabled(
    node: Node, path: str, service: str, enabled: list[str]
) -> None:
    states = {
        "nvidia-cdi-refresh.path": [f"ActiveState=active LoadState=loaded UnitFileState={path} "],
        # It has ended, or did not need to run.
        "nvidia-cdi-refresh.service": [f"{ENDED.format('success')}UnitFileState={service} "],
    }
    answers = {of(UnitStates, unit): state for unit, state in states.items()}
    commands = deploy(node, {**installed(), DRY_RUN: "ran", **answers}, "containerd", cdi=True).flat
    assert len(commands) == len(enabled)
    for command, unit in zip(commands, enabled, strict=True):
        assert "systemctl enable --quiet" in command
        assert "systemctl start" in command
        assert f" sh nvidia-cdi-refresh.{unit} " in command


@pytest.mark.parametrize(
    "result",
    [
        # The module of Debian's own driver is nvidia-current, which the condition of 1.18.0 does not know.
        pytest.param("exec-condition", id="nvidia-container-toolkit-1395"),
        pytest.param("exit-code", id="nvidia-container-toolkit-1517"),
        pytest.param("start-limit-hit", id="nvidia-container-toolkit-1611"),
    ],
)
def test_a_service_that_wrote_no_specification_at_the_boot_is_started_again(node: Node, result: str) -> None:
    service = {of(UnitStates, "nvidia-cdi-refresh.service"): [f"{ENDED.format(result)}UnitFileState=enabled "]}
    path = {of(UnitStates, "nvidia-cdi-refresh.path"): ["ActiveState=active LoadState=loaded UnitFileState=enabled "]}
    [started] = deploy(node, {**installed(), DRY_RUN: "ran", **service, **path}, "containerd", cdi=True).flat
    assert " sh nvidia-cdi-refresh.service " in started


@pytest.mark.parametrize(
    ("ends", "result", "failed"), [(0, "success", False), (0, "exec-condition", True), (1, "exit-code", True)]
)
def test_a_service_that_is_skipped_has_not_started(tmp_path: Path, ends: int, result: str, failed: bool) -> None:
    program(tmp_path / "systemctl", f"case $1 in start) exit {ends} ;; *) echo {result} ;; esac")
    program(tmp_path / "journalctl", "echo Skipped.")
    done = subprocess.run(
        ["sh", "-ec", units._START, "sh", "x.service", "the remedy"], capture_output=True, text=True, check=False,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert (done.returncode == 1, done.stderr == "Skipped.\nthe remedy\n") == (failed, failed)


@pytest.mark.parametrize(("boot", "waits"), [("boot-1", True), ("boot-0", False)])
def test_the_units_wait_for_the_reboot_that_loads_the_driver(node: Node, boot: str, waits: bool) -> None:
    """Without the driver the service fails. If that failed the host, the reboot would never come."""
    engines(node, "containerd", cdi=True)
    node.data["reboot"] = {"policy": "allow"}
    off = {of(UnitStates): ["ActiveState=inactive LoadState=loaded UnitFileState=disabled "]}
    requests = {of(NodeRebootRequests): ["boot-1", f"gpu_driver {boot} nouveau is loaded "]}
    result = node.deploy(container_runtime.configure, {**installed(), DRY_RUN: "ran", **off, **requests})
    assert (result.flat == []) is waits


def test_without_these_units_the_toolkit_is_too_old(node: Node) -> None:
    missing = {of(UnitStates): ["ActiveState=inactive LoadState=not-found UnitFileState= "]}
    result = deploy(node, {**installed(), DRY_RUN: "ran", **missing}, "containerd", cdi=True)
    assert "needs nvidia-container-toolkit 1.18" in result.refusal
