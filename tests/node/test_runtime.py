"""Container engines: the engines themselves show NVIDIA's runtime as their files say; the daemons' locked memory."""

import json
import re
from typing import Any

import pytest

from tests.node.evidence import Finding, Node, equal, judge

pytestmark = pytest.mark.runtime

DAEMON_JSON = "/etc/docker/daemon.json"
DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"
PROGRAM = "/usr/bin/nvidia-container-runtime"
STARTED = """
date -d "$(TZ=UTC systemctl show --property=ExecMainStartTimestamp --value containerd)" +%s
stat -c %Y "$1"
"""
IN_FORCE = 'if systemctl --quiet is-active "$1" && [ -e "$2" ]; then cat "$2"; fi'


@pytest.fixture(scope="module")
def docker(node: Node) -> dict[str, Any]:
    """What daemon.json says; nothing where dockerd does not run."""
    return dict(json.loads(node.run(IN_FORCE, "docker", DAEMON_JSON) or "{}"))


@pytest.fixture(scope="module")
def containerd(node: Node) -> tuple[str, str]:
    """NVIDIA's drop-in, and what containerd makes of all its files; empty where there is none, or no containerd runs."""
    drop_in = node.run(IN_FORCE, "containerd", DROP_IN)
    return drop_in, node.run("containerd config dump") if drop_in else ""


def value(text: str, key: str) -> str | None:
    """The value of a key that occurs in one section only; containerd 2 quotes otherwise than its predecessor."""
    match = re.search(rf"^\s*{key} = (.*)$", text, re.MULTILINE)
    return match[1].replace("'", '"') if match else None


def test_docker_has_the_runtime(node: Node, docker: dict[str, Any]) -> None:
    wanted = docker.get("runtimes", {}).get("nvidia")
    findings = []
    if wanted is not None:
        info = json.loads(node.run("docker info --format '{{json .}}'"))
        findings.append(
            equal("dockerd", "runtime nvidia", wanted["path"], info["Runtimes"].get("nvidia", {}).get("path"))
        )
        if default := docker.get("default-runtime"):
            findings.append(equal("dockerd", "default runtime", default, info["DefaultRuntime"]))
        if docker.get("features", {}).get("cdi"):
            folders = info.get("CDISpecDirs") or []
            findings.append(Finding("dockerd", "folders of CDI specifications", "some", folders, bool(folders)))
    judge(node, findings, "no NVIDIA runtime in docker")


def test_containerd_has_the_runtime(node: Node, containerd: tuple[str, str]) -> None:
    """It runs by its present files, which it reads when it starts; and containers survive that."""
    drop_in, dump = containerd
    findings = []
    if drop_in:
        wanted = {key: value(drop_in, key) for key in ("default_runtime_name", "enable_cdi")}
        findings += [equal("containerd", key, given, value(dump, key)) for key, given in wanted.items() if given]
        there = PROGRAM in dump
        findings.append(Finding("containerd", "BinaryName of a runtime", PROGRAM, "it" if there else "another", there))
        started, written = map(int, node.run(STARTED, DROP_IN).split())
        findings.append(
            Finding("containerd", "start", f"after {written}, when its file changed", started, started >= written)
        )
        mode = node.run("systemctl show --property=KillMode --value containerd").strip()
        findings.append(Finding("containerd", "KillMode", "process or none", mode, mode in ("process", "none")))
    judge(node, findings, "no NVIDIA runtime in containerd")


def test_cdi_specifications_are_kept_fresh(node: Node, docker: dict[str, Any], containerd: tuple[str, str]) -> None:
    wanted = docker.get("features", {}).get("cdi") or value(containerd[0], "enable_cdi") == "true"
    units = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")
    findings = [
        equal(unit, "UnitFileState", "enabled", node.run('systemctl is-enabled "$1" || true', unit).strip())
        for unit in units
        if wanted
    ]
    judge(node, findings, "no engine of it has CDI")


def test_daemons_lock_memory_without_a_limit(node: Node) -> None:
    """By the limits of their processes."""
    script = """
    for file in /etc/systemd/system/*.service.d/trackbed-limits.conf; do
      unit=${file%.d/*}; unit=${unit##*/}
      pid=$(systemctl show --property=MainPID --value "$unit")
      if [ -e "$file" ] && [ "${pid:-0}" != 0 ]; then echo "$unit|$(grep '^Max locked memory' "/proc/$pid/limits")"; fi
    done
    """
    findings = [
        equal(unit, "Max locked memory", ["unlimited", "unlimited"], limits.split()[3:5])
        for unit, limits in (line.split("|") for line in node.run(script).splitlines())
    ]
    judge(node, findings, "no daemon with a drop-in runs")


def test_logins_lock_memory_without_a_limit(node: Node) -> None:
    """By the limit of this login, if the deploy's file is there."""
    script = (
        "if [ -e /etc/security/limits.d/90-trackbed.conf ]; then prlimit --memlock --noheadings --output=SOFT,HARD; fi"
    )
    shown = node.run(script).split()
    judge(node, [equal("login", "memlock", ["unlimited"] * 2, shown)] if shown else [], "it has no file for logins")
