from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import fields
from pyinfra.api.exceptions import DeployError

from tasks.common.archive import ROOT
from tasks.containers import container_engine, engine_files
from tests.deploy.conftest import DEBIAN, ROCKY_9, Answers, Node, file_answers
from tests.deploy.test_scripts import program, sh

DRY_RUN = "sh dry-run"
RUNNING = "ActiveState=active LoadState=loaded UnitFileState=enabled "
STATE = "UnitFileState,ActiveState"
RESTART = "engine=$1\nstopped_by_restart"
DEBIAN_13 = {"*-release": ["/etc/os-release", "ID=debian", "NAME=Debian", 'VERSION_ID="13"', "---"]}
ALINUX = {"*-release": ["/etc/os-release", 'ID="alinux"', 'NAME="Alibaba Cloud Linux"', 'VERSION_ID="3"', "---"]}
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


def have(*names: str, version: str = "1.7.24") -> list[str]:
    return [f"ii  {name}  {version}  amd64  x" for name in ("gpg", *names)]


def test_without_the_key_nothing_is_done(node: Node) -> None:
    assert node.deploy(container_engine.install, {}).planned == {}


def test_fresh_debian_with_containerd_of_the_distribution(node: Node) -> None:
    wants(node, name="containerd")
    after = {**DEBIAN, "dpkg -l": have("containerd"), STATE: [RUNNING], DRY_RUN: ["ran", "change x"]}
    result = node.deploy(container_engine.install, DEBIAN, after)
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


def test_fresh_debian_with_docker_of_the_vendor_at_a_version(node: Node) -> None:
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
    assert held == "apt-mark hold docker-ce docker-ce-cli"
    [enabled] = result.commands[f"{PREFIX}docker enabled"]
    assert "systemctl enable --quiet" in enabled
    assert "sh docker.service " in enabled
    # Only Kubernetes' own engine is configured for it.
    assert f"{PREFIX}containerd for Kubernetes" not in result.planned


@pytest.mark.parametrize(("system", "names"), [(DEBIAN, "docker.io"), (DEBIAN_13, "docker.io docker-cli")])
def test_docker_of_debian_has_a_client(node: Node, system: Answers, names: str) -> None:
    wants(node, name="docker")
    [apt] = node.deploy(container_engine.install, {**system, STATE: [RUNNING]}).commands[f"{PREFIX}Packages"]
    assert apt.endswith(f" sh '' '' {names}")


def test_fresh_rocky(node: Node) -> None:
    wants(node, name="containerd", source="vendor")
    result = node.deploy(container_engine.install, {**ROCKY_9, STATE: [RUNNING], DRY_RUN: ["ran", "change x"]})
    source = result.uploads["/etc/yum.repos.d/trackbed-docker.repo"].decode()
    assert "baseurl=https://download.docker.com/linux/centos/9/$basearch/stable\n" in source
    key = result.commands[f"{PREFIX}docker: key of its repository"][-1]
    assert "https://download.docker.com/linux/centos/gpg 060A61C51B558A7F742B77AAC52FEB6B621E9F35 " in key
    assert result.commands[f"{PREFIX}Packages"][0].endswith(" containerd.io")


def test_each_key_is_documented() -> None:
    page = (ROOT / "docs/inventory.md").read_text()
    assert [
        each.name
        for each in fields(container_engine.ContainerEngine)
        if f"| `container_engine.{each.name}` |" not in page
    ] == []


def test_unchanged(node: Node) -> None:
    wants(node, name="containerd", source="vendor", version="1.7.24-1")
    there = {
        **DEBIAN,
        "dpkg -l": have("containerd.io", version="1.7.24-1"),
        "apt-mark showhold": ["containerd.io"],
        "--show-keys": "9DC858229FC7DD38854AE2D88D81803C0EBFCD88",
        STATE: [RUNNING],
        DRY_RUN: "ran",
        **file_answers("/etc/apt/sources.list.d/trackbed-docker.sources", SOURCE),
    }
    result = node.deploy(container_engine.install, there)
    assert not any(result.planned.values())
    assert result.flat == []


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
    wants(node, name="containerd", source=source)
    result = node.deploy(container_engine.install, {**DEBIAN, "dpkg -l": have(*installed)})
    assert result.failed
    [refused] = result.flat
    assert refused.startswith(
        f"refuse: container_engine: the node has {named}, which the packages of the source '{source}'"
    )
    assert "drain the node" in refused


def test_another_version_is_refused_while_its_restart_would_stop_containers(node: Node) -> None:
    wants(node, name="docker", version="20.10.24+dfsg1-1")
    there = {**DEBIAN, "dpkg -l": have("docker.io", version="20.10.5+dfsg1-1"), STATE: [RUNNING]}
    reason = 'would stop 3 containers; set "live-restore": true in /etc/docker/daemon.json, or stop them'
    result = node.deploy(container_engine.install, {**there, RESTART: [reason]})
    assert result.failed
    [refused] = result.flat
    assert refused.startswith(f"refuse: container_engine: another version of docker.io restarts docker, which {reason}")
    [apt, _] = node.deploy(container_engine.install, there).flat
    assert apt.endswith(" docker.io=20.10.24+dfsg1-1")


@pytest.mark.parametrize(
    ("output", "refused"),
    [
        (
            ["ran", "fault containerd: it cannot read its configuration: (4, 1): x"],
            "it cannot read its configuration: (4, 1)",
        ),
        (
            ["ran", "change a", "lost plugins.x.y"],
            "your settings plugins.x.y would be lost; set what Kubernetes needs yourself",
        ),
        ([], "the node has no containerd"),
    ],
)
def test_refused_with_the_remedy(node: Node, output: list[str], refused: str) -> None:
    wants(node, name="containerd")
    there = {**DEBIAN, "dpkg -l": have("containerd"), STATE: [RUNNING]}
    result = node.deploy(container_engine.install, there, {**there, DRY_RUN: output})
    assert result.failed
    assert result.flat[-1].startswith("refuse: container_engine: ")
    assert refused in result.flat[-1]


def test_a_file_that_containerd_has_not_loaded_is_loaded(node: Node) -> None:
    wants(node, name="containerd")
    there = {**DEBIAN, "dpkg -l": have("containerd"), STATE: [RUNNING], DRY_RUN: ["ran", "pending"]}
    [applied] = node.deploy(container_engine.install, there).flat
    assert applied.endswith(" sh apply")


@pytest.mark.parametrize(
    ("system", "data", "message"),
    [
        (DEBIAN, {}, "the key 'name' is missing"),
        (DEBIAN, {"name": "podman"}, 'name: "podman" is not one of containerd, docker'),
        (DEBIAN, {"name": "docker", "version": "28; reboot"}, "'28; reboot' is not valid"),
        (DEBIAN, {"name": "docker", "channel": "stable"}, "unknown key 'channel'"),
        (
            DEBIAN,
            {
                "name": "docker",
                "repository": {"uri": "http://a.example", "key": "http://a.example/k", "fingerprint": "0" * 40},
            },
            "repository: it replaces Docker's; give the source 'vendor'",
        ),
    ],
)
def test_bad_data(node: Node, system: Answers, data: dict[str, Any], message: str) -> None:
    node.data = {"container_engine": data}
    with pytest.raises(DeployError) as caught:
        node.deploy(container_engine.install, system)
    assert str(caught.value).startswith("@fake/node-a.container_engine: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("system", "source", "message"),
    [
        (ROCKY_9, "distribution", "Rocky Linux 9.4 has no package of docker; give the source 'vendor'"),
        (
            ALINUX,
            "vendor",
            "Docker documents no repository for Alibaba Cloud Linux 3; give container_engine.repository",
        ),
    ],
)
def test_a_distribution_without_packages(node: Node, system: Answers, source: str, message: str) -> None:
    wants(node, name="docker", source=source)
    with pytest.raises(DeployError, match=re.escape(message)):
        node.deploy(container_engine.install, system)


# A containerd that reads its file as TOML, and knows the plugin's section by the name that its version has.
CONTAINERD = """\
#!{python} -IS
import json, sys, tomllib
from pathlib import Path
if sys.argv[1] == "--version":
    sys.exit(print("containerd github.com/containerd/containerd {release} abc"))
try:
    given = tomllib.loads(Path("{main}").read_text()) if sys.argv[1:] == ["config", "dump"] else {{"version": 2}}
except tomllib.TOMLDecodeError as error:
    sys.exit(f"containerd: {{error}}")
options = {{"SystemdCgroup": False, "Root": ""}}
runc = {{"runtime_type": "io.containerd.runc.v2", "sandbox_mode": "podsandbox", "options": options}}
runtimes = {{"runc": runc}}
new = "{release}".startswith("v2") and given.get("version", 3) == 3
at = "io.containerd.cri.v1.runtime" if new else "io.containerd.grpc.v1.cri"
own = given.get("plugins", {{}}).get(at, {{}})
own.setdefault("containerd", {{}}).setdefault("runtimes", runtimes)
def show(table, name):
    values = {{key: value for key, value in table.items() if not isinstance(value, dict)}}
    if name:
        print(f"[{{name}}]")
    for key, value in values.items():
        print(f"  {{key}} = {{json.dumps(value)}}")
    for key, value in table.items():
        if isinstance(value, dict):
            quoted = f'"{{key}}"' if "." in key else key
            show(value, f"{{name}}.{{quoted}}" if name else quoted)
disabled = given.get("disabled_plugins", [])
show({{"disabled_plugins": disabled, "oom_score": given.get("oom_score", 0)}}, "")
if not any("cri" in each for each in disabled):
    show({{at: own}}, "plugins")
"""
SYSTEMCTL = """
echo "$*" >> {log}
case "$1" in
is-active) echo active ;;
restart) touch {started}; {restart} ;;
show) case "$*" in *KillMode*) echo {kill_mode} ;; *) date -u -r {started} '+%a %F %T UTC' ;; esac ;;
esac
"""
# The real script mounts an overlay, which takes root. Here both copies of /etc are folders.
OVERLAY = """
overlay() {{ cp -a {real}/etc {work}/etc; cd {work}; }}
real() {{ echo "{real}${{1#{work}}}"; }}
"""


class Machine:
    """A folder that stands for a node with containerd. ``log`` has the calls of systemctl."""

    def __init__(
        self, folder: Path, release: str, shim: bool = False, kill_mode: str = "process", restart: str = ":"
    ) -> None:
        self.real, self.work, self.log = folder / "real", folder / "work", folder / "log"
        self.main = self.real / "etc/containerd/config.toml"
        self.main.parent.mkdir(parents=True)
        self.bin = folder / "bin"
        started = folder / "started"
        started.write_text("")
        os.utime(started, (1_700_000_000, 1_700_000_000))
        program(
            self.bin / "systemctl",
            SYSTEMCTL.format(log=self.log, started=started, kill_mode=kill_mode, restart=restart),
        )
        program(self.bin / "containerd")
        main = self.work / "etc/containerd/config.toml"
        (self.bin / "containerd").write_text(CONTAINERD.format(python=sys.executable, release=release, main=main))
        program(self.bin / "pgrep", "" if shim else "exit 1")
        program(self.bin / "ctr", "echo 'io.containerd.grpc.v1 cri linux/amd64 ok'")
        program(self.bin / "journalctl", "echo 'it did not like that'")

    def write(self, text: str) -> None:
        """Write the file, as before the daemon's start."""
        self.main.write_text(text)
        os.utime(self.main, (1_600_000_000, 1_600_000_000))

    def run(self, mode: str) -> engine_files.DryRun:
        """Run the script."""
        sh('rm -rf "$1"; mkdir "$1"', self.work)
        own = (ROOT / "templates" / container_engine.SCRIPT).read_text().replace("/etc/", f"{self.work}/etc/")
        text = engine_files.SHARED.read_text() + OVERLAY.format(real=self.real, work=self.work) + own
        return engine_files.parse(sh(text, mode, PATH=f"{self.bin}:{os.environ['PATH']}"))


ENABLED_CRI = "disabled_plugins = []"
RUNC_2 = """
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = true
"""
RUNC_3 = RUNC_2.replace("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime")


@pytest.mark.parametrize(
    ("release", "before", "after"),
    [
        # As containerd.io brings it.
        ("1.7.24", 'disabled_plugins = ["cri"]\n# root = "/x"\n', f'version = 2\n{ENABLED_CRI}\n# root = "/x"\n{RUNC_2}'),
        ("v2.2.9", 'disabled_plugins = ["cri"]\n', f"version = 3\n{ENABLED_CRI}\n{RUNC_3}"),
        ("1.6.20", "", f"version = 2\n{RUNC_2}"),
        ("v2.2.9", "", f"version = 3\n{RUNC_3}"),
        # containerd 2 with the file of containerd 1.
        ("v2.2.9", "version = 2\noom_score = -9 # mine\n", f"version = 2\noom_score = -9 # mine\n{RUNC_2}"),
        (
            "1.7.24",
            'version = 2\ndisabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.grpc.v1.cri"]\n',
            f'version = 2\ndisabled_plugins = ["io.containerd.snapshotter.v1.aufs"]\n{RUNC_2}',
        ),
        ("v2.2.9", f"version = 3\n{RUNC_3.replace('true', 'false')}", f"version = 3\n{RUNC_3}"),
        (
            "v2.2.9",
            "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options] # ours\nBinaryName='/x'\n",
            "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options] # ours\n"
            "  SystemdCgroup = true\nBinaryName='/x'\n" + "\n".join(RUNC_3.split("\n")[:3]) + "\n",
        ),
    ],
)  # fmt: skip
def test_the_file_gets_what_kubernetes_needs(tmp_path: Path, release: str, before: str, after: str) -> None:
    machine = Machine(tmp_path, release)
    if before:
        machine.write(before)
    planned = machine.run("dry-run")
    assert planned.faults == planned.lost == ()
    assert planned.changes != ()
    assert machine.main.exists() == bool(before)
    machine.run("apply")
    assert machine.main.read_text() == after
    assert machine.log.read_text().count("restart containerd") == 1
    # The second time there is nothing to do.
    assert machine.run("dry-run") == engine_files.DryRun()


def test_a_correct_file_is_not_changed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "1.7.24")
    machine.write(f"# mine\nversion = 2\n{RUNC_2}")
    assert machine.run("dry-run") == engine_files.DryRun()
    os.utime(machine.main)
    assert machine.run("dry-run").pending
    machine.run("apply")
    assert machine.main.read_text().startswith("# mine\n")
    assert "restart containerd" in machine.log.read_text()


@pytest.mark.parametrize(
    ("before", "fault"),
    [
        (
            "[plugins.cri]\nsystemd_cgroup = true\n",
            "is of version 1, which knows the plugin of Kubernetes by another name",
        ),
        ("version = 1\n", "is of version 1"),
        ("version = 2\n[x\n", "it cannot read its configuration"),
        (
            'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes]\nrunc = {runtime_type = "x"}\n',
            "cannot be edited by lines: ",
        ),
        ("version = 3\n", "containerd 1.7.24 does not know version 3 of the file"),
        ('version = 2\ndisabled_plugins = [\n  "io.containerd.grpc.v1.cri",\n]\n', "the CRI plugin is still disabled"),
    ],
)
def test_a_file_that_cannot_be_edited_stays(tmp_path: Path, before: str, fault: str) -> None:
    machine = Machine(tmp_path, "1.7.24")
    machine.write(before)
    [said] = machine.run("dry-run").faults
    assert said.startswith("containerd: ")
    assert fault in said
    with pytest.raises(AssertionError):
        machine.run("apply")
    assert machine.main.read_text() == before
    assert "restart" not in (machine.log.read_text() if machine.log.exists() else "")


def test_containers_that_a_restart_would_stop_keep_running(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "1.7.24", shim=True, kill_mode="control-group")
    machine.write("version = 2\n")
    [said] = machine.run("dry-run").faults
    assert "which with KillMode=control-group in its unit would stop all containers; set KillMode=process" in said
    assert machine.main.read_text() == "version = 2\n"


def test_a_file_that_containerd_does_not_accept_is_taken_back(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "1.7.24", shim=True, restart="exit 1")
    machine.write("version = 2\n")
    with pytest.raises(AssertionError):
        machine.run("apply")
    assert machine.main.read_text() == "version = 2\n"


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ("2 false", ['would stop 2 containers; set "live-restore": true in /etc/docker/daemon.json, or stop them']),
        ("2 true", []),
        ("0 false", []),
    ],
)
def test_when_a_restart_of_docker_would_stop_containers(tmp_path: Path, info: str, reason: list[str]) -> None:
    program(tmp_path / "docker", f"echo {info}")
    text = engine_files.SHARED.read_text() + "engine=$1\nstopped_by_restart\n"
    assert sh(text, "docker", PATH=f"{tmp_path}:{os.environ['PATH']}") == reason
