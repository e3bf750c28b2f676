from typing import Any

import pytest

from tasks.common.units import UnitStates
from tasks.containers import container_engine
from tasks.containers.container_engine import StoppedByRestart
from tasks.packages import DISTRIBUTIONS, OperatingSystem
from tasks.packages.holds import HeldPackages
from tasks.packages.vendor_repository import KeyFingerprints
from tests.deploy.conftest import DEBIAN, ROCKY_9, Answers, Node, Result, file_answers, of
from tests.deploy.systems import ALINUX, DEBIAN_13

DRY_RUN = "sh dry-run"
RUNNING = "ActiveState=active LoadState=loaded UnitFileState=enabled "
STATE = of(UnitStates)
RESTART = of(StoppedByRestart)
PREFIX = "Container engine | "
SOURCE = """\
# Written by Trackbed; changes here are overwritten.
Types: deb
URIs: https://download.docker.com/linux/debian
Suites: bookworm
Components: stable
Signed-By: /etc/apt/keyrings/trackbed-docker.gpg
"""


def wants(node: Node, **data: Any) -> None:
    node.data = {"container_engine": data}


def deploy(node: Node, answers: Answers, later: Answers | None = None, **data: Any) -> Result:
    wants(node, **data)
    return node.deploy(container_engine.install, answers, later)


def have(*names: str, version: str = "1.7.24") -> list[str]:
    return [f"ii  {name}  {version}  amd64  x" for name in ("gpg", *names)]


def test_a_fresh_debian_gets_containerd_of_the_distribution(node: Node) -> None:
    after = {**DEBIAN, "dpkg -l": have("containerd"), STATE: [RUNNING], DRY_RUN: ["ran", "change x"]}
    result = deploy(node, DEBIAN, after, name="containerd")
    assert list(result.planned) == [
        f"{PREFIX}{name}"
        for name in (
            "No engine of another source",
            "docker: no repository",
            "docker: no key of a repository",
            "Packages",
            "containerd enabled",
            "containerd for Kubernetes",
        )
    ]
    changes = [name for name, change in result.planned.items() if change]
    assert changes == [f"{PREFIX}{name}" for name in ("Packages", "containerd enabled", "containerd for Kubernetes")]
    [applied] = result.commands[f"{PREFIX}containerd for Kubernetes"]
    assert applied.startswith("unshare --mount sh -ec ")
    assert applied.endswith(" sh apply")


def test_a_fresh_debian_gets_the_vendors_docker_at_the_given_version(node: Node) -> None:
    wants(node, name="docker", source="vendor", version="5:28.0.4-1~debian.12~bookworm")
    result = node.deploy(
        container_engine.install, {**DEBIAN, "dpkg -l": have(), STATE: [RUNNING.replace("enabled", "disabled")]}
    )
    assert result.uploads["/etc/apt/sources.list.d/trackbed-docker.sources"].decode() == SOURCE
    key = result.commands[f"{PREFIX}docker: key of its repository"][0]
    assert "https://download.docker.com/linux/debian/gpg 9DC858229FC7DD38854AE2D88D81803C0EBFCD88 " in key
    apt, held = result.commands[f"{PREFIX}Packages"]
    version = "5:28.0.4-1~debian.12~bookworm"
    assert apt.endswith(f" 'docker-ce={version}' 'docker-ce-cli={version}' containerd.io")
    assert held.endswith("apt-mark hold docker-ce docker-ce-cli")
    [enabled] = result.commands[f"{PREFIX}docker enabled"]
    assert "systemctl enable --quiet" in enabled
    assert "sh docker.service " in enabled
    # Only Kubernetes' own engine is configured for it.
    assert f"{PREFIX}containerd for Kubernetes" not in result.planned


@pytest.mark.parametrize(("system", "names"), [(DEBIAN, "docker.io"), (DEBIAN_13, "docker.io docker-cli")])
def test_debians_docker_is_installed_with_its_client(node: Node, system: Answers, names: str) -> None:
    [apt] = deploy(node, {**system, STATE: [RUNNING]}, name="docker").commands[f"{PREFIX}Packages"]
    assert apt.endswith(f" sh '' '' {names}")


@pytest.mark.parametrize(
    ("release", "suite"), [("24.04", "noble"), pytest.param("26.04", "resolute", id="devcontainers-features-1640")]
)
def test_docker_has_a_suite_for_each_lts_of_ubuntu(release: str, suite: str) -> None:
    system = OperatingSystem(DISTRIBUTIONS["ubuntu"], "ubuntu", release)
    assert container_engine.docker_repository(system).suite == suite


def test_a_fresh_rocky_gets_packages_repository_and_service(node: Node) -> None:
    wants(node, name="containerd", source="vendor")
    result = node.deploy(container_engine.install, {**ROCKY_9, STATE: [RUNNING], DRY_RUN: ["ran", "change x"]})
    source = result.uploads["/etc/yum.repos.d/trackbed-docker.repo"].decode()
    assert "baseurl=https://download.docker.com/linux/centos/9/$basearch/stable\n" in source
    key = result.commands[f"{PREFIX}docker: key of its repository"][-1]
    assert "https://download.docker.com/linux/centos/gpg 060A61C51B558A7F742B77AAC52FEB6B621E9F35 " in key
    assert result.commands[f"{PREFIX}Packages"][0].endswith(" containerd.io")


def test_nothing_is_done_if_all_is_in_place(node: Node) -> None:
    there = {
        **DEBIAN,
        "dpkg -l": have("containerd.io", version="1.7.24-1"),
        of(HeldPackages): ["containerd.io"],
        of(KeyFingerprints): "9DC858229FC7DD38854AE2D88D81803C0EBFCD88",
        STATE: [RUNNING],
        DRY_RUN: "ran",
        **file_answers("/etc/apt/sources.list.d/trackbed-docker.sources", SOURCE),
    }
    assert deploy(node, there, name="containerd", source="vendor", version="1.7.24-1").did_nothing


@pytest.mark.parametrize(
    ("source", "installed", "named"),
    [
        ("vendor", ("docker.io", "containerd"), "containerd, docker.io"),
        ("distribution", ("containerd.io",), "containerd.io"),
    ],
)
def test_an_engine_of_another_source_is_not_replaced(
    node: Node, source: str, installed: tuple[str, ...], named: str
) -> None:
    refused = deploy(node, {**DEBIAN, "dpkg -l": have(*installed)}, name="containerd", source=source).refusal
    assert refused.startswith(f"refuse: container_engine: the node has {named}, which the packages")
    assert f"'{source}'" in refused and "drain the node" in refused


def test_another_version_is_refused_while_its_restart_would_stop_containers(node: Node) -> None:
    wants(node, name="docker", version="20.10.24+dfsg1-1")
    there = {**DEBIAN, "dpkg -l": have("docker.io", version="20.10.5+dfsg1-1"), STATE: [RUNNING]}
    reason = 'would stop 3 containers; set "live-restore": true in /etc/docker/daemon.json, or stop them'
    result = node.deploy(container_engine.install, {**there, RESTART: [reason]})
    refused = result.refusal
    assert refused.startswith("refuse: container_engine: ") and f" restarts docker, which {reason}" in refused
    [apt, _] = node.deploy(container_engine.install, there).flat
    assert apt.endswith(" docker.io=20.10.24+dfsg1-1")


@pytest.mark.parametrize(
    ("output", "refused"),
    [
        (["ran", "fault containerd: it cannot read (4, 1): x"], "containerd: it cannot read (4, 1)"),
        (["ran", "change a", "lost plugins.x.y"], "your settings plugins.x.y would be lost"),
        ([], "the node has no containerd"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(node: Node, output: list[str], refused: str) -> None:
    there = {**DEBIAN, "dpkg -l": have("containerd"), STATE: [RUNNING]}
    result = deploy(node, there, {**there, DRY_RUN: output}, name="containerd")
    assert result.failed
    assert result.flat[-1].startswith("refuse: container_engine: ")
    assert refused in result.flat[-1]


def test_a_file_that_containerd_has_not_loaded_is_loaded(node: Node) -> None:
    there = {**DEBIAN, "dpkg -l": have("containerd"), STATE: [RUNNING], DRY_RUN: ["ran", "pending"]}
    [applied] = deploy(node, there, name="containerd").flat
    assert applied.endswith(" sh apply")


@pytest.mark.parametrize(
    ("system", "source", "message"),
    [
        (ROCKY_9, "distribution", "Rocky Linux 9.4 has no package of docker"),
        (ALINUX, "vendor", "Docker documents no repository for Alibaba Cloud Linux 3"),
    ],
)
def test_a_distribution_without_such_packages_is_refused(
    node: Node, system: Answers, source: str, message: str
) -> None:
    result = deploy(node, system, name="docker", source=source)
    error = result.refusal
    assert "@fake/node-a.container_engine" in error and message in error
