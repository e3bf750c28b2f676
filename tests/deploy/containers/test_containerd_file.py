"""The scripts that edit containerd's main file, run here with stand-ins for containerd and systemctl."""

import os
import sys
import time
from pathlib import Path

import pytest

from tasks.containers import container_engine, engine_files
from tests.deploy.scripts import sh
from tests.stand_ins import program, text_file

# A containerd that reads its file as TOML, with the plugin's section named as in its version.
CONTAINERD = """\
#!{python} -IS
import json, sys, tomllib
from pathlib import Path
if sys.argv[1] == "--version":
    sys.exit(print("containerd github.com/containerd/containerd {release} abc"))
try:
    given = {{"version": 2}} if "default" in sys.argv else tomllib.loads(Path("{main}").read_text())
except tomllib.TOMLDecodeError as error:
    sys.exit(f"containerd: {{error}}")
options = {{"SystemdCgroup": False, "Root": ""}}
runc = {{"runtime_type": "io.containerd.runc.v2", "sandbox_mode": "podsandbox", "options": options}}
runtimes = {{"runc": runc}}
old = "{release}".startswith("1")
at = "io.containerd.grpc.v1.cri" if old else "io.containerd.cri.v1.runtime"
plugins = given.get("plugins", {{}})
if given.get("version") == 2 and not old and not ("{release}" == "v2.0.4" and "dump" in sys.argv):
    plugins[at] = plugins.get("io.containerd.grpc.v1.cri", {{}})
# A plugin's settings in an imported file replace those of the main file as a whole.
for pattern in given.get("imports", []):
    for path in Path(pattern).parent.glob(Path(pattern).name):
        for name, settings in tomllib.loads(path.read_text()).get("plugins", {{}}).items():
            plugins[at] = settings
own = plugins.get(at, {{}})
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
show({{"imports": given.get("imports", []), "disabled_plugins": disabled, "oom_score": given.get("oom_score", 0)}}, "")
if not any("cri" in each for each in disabled):
    show({{at: own}}, "plugins")
"""

SYSTEMCTL = """
echo "$*" >> {log}
case "$1" in
is-active) echo active ;;
restart) touch {started}; {restart} ;;
show)
  case "$*" in
  *KillMode*) echo {kill_mode} ;;
  *Monotonic*) echo {since_boot} ;;
  *) date -u -r {started} '+%a %F %T UTC' ;;
  esac ;;
esac
"""

# The real script mounts an overlay, which only root may do. Here both copies of /etc are folders.
OVERLAY = """
overlay() {{ cp -a {real}/etc {work}/etc; cd {work}; }}
real() {{ echo "{real}${{1#{work}}}"; }}
"""


class Machine:
    """A folder that stands for a node with containerd. ``log`` has the calls of systemctl."""

    def __init__(
        self,
        folder: Path,
        release: str,
        shim: bool = False,
        kill_mode: str = "process",
        restart: str = ":",
        since_boot: object = "",
    ) -> None:
        self.folder = folder
        self.real, self.work, self.log = folder / "real", folder / "work", folder / "log"
        self.main = self.real / "etc/containerd/config.toml"
        self.main.parent.mkdir(parents=True)
        self.bin = folder / "bin"
        started = folder / "started"
        started.write_text("")
        os.utime(started, (1_700_000_000, 1_700_000_000))
        program(
            self.bin / "systemctl",
            SYSTEMCTL.format(
                log=self.log, started=started, kill_mode=kill_mode, restart=restart, since_boot=since_boot
            ),
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

    def kubelet(self, text: str, *arguments: str) -> None:
        """Write the kubelet's configuration, and start a kubelet with these arguments, if any."""
        config = self.folder / "var/lib/kubelet/config.yaml"
        text_file(config, text)
        if arguments:
            text_file(self.folder / "proc/42/cmdline", "\0".join(("kubelet", *arguments, "")))
            program(self.bin / "pgrep", '[ "$2" = kubelet ] && echo 42')

    def run(self, mode: str) -> engine_files.DryRun:
        """Run the script."""
        sh('rm -rf "$1"; mkdir "$1"', self.work)
        own = container_engine.SCRIPT.removeprefix(engine_files.SHARED).replace("/etc/", f"{self.work}/etc/")
        for outside in ("/var/lib/kubelet/", "/proc/"):
            own = own.replace(outside, f"{self.folder}{outside}")
        text = engine_files.SHARED + OVERLAY.format(real=self.real, work=self.work) + own
        return engine_files.parse(sh(text, mode, programs=self.bin))


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
        # As `containerd config default` writes it, with all default values.
        (
            "v2.2.9",
            f"version = 3\n{RUNC_3.replace('true', 'false')}  NoNewKeyring = false\n",
            f"version = 3\n{RUNC_3}  NoNewKeyring = false\n",
        ),
        ("v2.0.4", "version = 2\n", f"version = 2\n{RUNC_2}"),
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


@pytest.mark.parametrize("path", [pytest.param("bin:", id="nvidia-container-toolkit-982"), ""])
def test_the_containerd_of_the_unit_is_asked_wherever_it_is(tmp_path: Path, path: str) -> None:
    """Another one is first in PATH, or PATH has none."""
    machine = Machine(tmp_path, "1.7.24")
    unit = tmp_path / "usr/local/bin/containerd"
    main = machine.work / "etc/containerd/config.toml"
    program(unit)
    unit.write_text(CONTAINERD.format(python=sys.executable, release="v2.2.9", main=main))
    answer = f"{{ path={unit} ; argv[]={unit} --log-level info ; ignore_errors=no }}"
    shown = f'case "$*" in *ExecStart" "*) echo "{answer}"; exit ;; esac'
    systemctl = machine.bin / "systemctl"
    systemctl.write_text(systemctl.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{shown}\n", 1))
    if not path:
        (machine.bin / "containerd").unlink()
    machine.write("version = 3\n")
    assert machine.run("apply").changes
    assert machine.main.read_text() == f"version = 3\n{RUNC_3}"


def test_a_correct_file_is_not_changed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "1.7.24")
    machine.write(f"# mine\nversion = 2\n{RUNC_2}")
    assert machine.run("dry-run") == engine_files.DryRun()
    os.utime(machine.main)
    assert machine.run("dry-run").pending
    machine.run("apply")
    assert machine.main.read_text().startswith("# mine\n")
    assert "restart containerd" in machine.log.read_text()
    # A restart would not change this, so each deploy would do one.
    os.utime(machine.main, (4_000_000_000, 4_000_000_000))
    assert machine.run("dry-run") == engine_files.DryRun()


@pytest.mark.parametrize(("age", "pending"), [(200, False), (50, True)], ids=["before the start", "after the start"])
def test_a_clock_that_was_set_makes_containerd_s_file_no_newer(tmp_path: Path, age: int, pending: bool) -> None:
    """systemd shows the start by the clock of that moment: here years too early."""
    since_boot = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 100) * 1_000_000)
    machine = Machine(tmp_path, "1.7.24", since_boot=since_boot)
    machine.write(f"version = 2\n{RUNC_2}")
    written = time.time() - age
    os.utime(machine.main, (written, written))
    assert machine.run("dry-run").pending == pending


@pytest.mark.parametrize("release", ["v2.0.4", "v2.2.9"])
def test_a_file_of_version_2_is_read_as_containerd_2_reads_it(tmp_path: Path, release: str) -> None:
    machine = Machine(tmp_path, release)
    machine.write(f"version = 2\n{RUNC_2}")
    assert machine.run("dry-run") == engine_files.DryRun()


CGROUPFS = RUNC_2.replace("true", "false # the kubelet has cgroupfs")


@pytest.mark.parametrize(
    "text", ["cgroupDriver: cgroupfs\n", 'cgroupDriver: "cgroupfs" # old\n', "kind: KubeletConfiguration\n"]
)
@pytest.mark.parametrize("before", [f"version = 2\n{CGROUPFS}", "version = 2\n"])
def test_a_kubelet_with_cgroupfs_keeps_it(tmp_path: Path, before: str, text: str) -> None:
    machine = Machine(tmp_path, "1.7.24")
    machine.kubelet(text)
    machine.write(before)
    assert machine.run("dry-run") == engine_files.DryRun()
    machine.write(f'disabled_plugins = ["cri"]\n{before}')
    machine.run("apply")
    assert machine.main.read_text() == f"{ENABLED_CRI}\n{before}"


@pytest.mark.parametrize(
    ("text", "arguments", "driver"),
    [
        (None, (), "not known yet"),
        ("cgroupDriver: systemd\n", (), "systemd"),
        ("# cgroupDriver: cgroupfs\ncgroupDriver: 'systemd'\n# cgroupDriver: cgroupfs\n", (), "systemd"),
        ('{"kind": "KubeletConfiguration", "cgroupDriver": "systemd", "port": 1}', (), "systemd"),
        ("", ("--cgroup-driver=systemd",), "systemd"),
        ("", ("--v=2", "--cgroup-driver", "systemd"), "systemd"),
        ("", ("--config", "{folder}/other.yaml"), "systemd"),
        ("", ("--config={folder}/other.yaml",), "systemd"),
        ("cgroupDriver: cgroupfs\n", ("--config-dir={folder}/more",), "systemd"),
    ],
)
def test_an_explicit_cgroupfs_of_the_operator_is_not_overwritten(
    tmp_path: Path, text: str | None, arguments: tuple[str, ...], driver: str
) -> None:
    machine = Machine(tmp_path, "1.7.24")
    (tmp_path / "more").mkdir()
    for file in ("other.yaml", "more/10-ours.conf"):
        (tmp_path / file).write_text("cgroupDriver: systemd\n")
    if text is not None:
        machine.kubelet(text, *(each.format(folder=tmp_path) for each in arguments))
    machine.write(f"version = 2\n{CGROUPFS}")
    [fault] = machine.run("dry-run").faults
    assert "config.toml sets SystemdCgroup = false" in fault
    assert f"the kubelet's cgroup driver is {driver}; " in fault
    with pytest.raises(AssertionError):
        machine.run("apply")
    assert machine.main.read_text() == f"version = 2\n{CGROUPFS}"


def test_an_explicit_cgroupfs_in_an_imported_file_is_not_overwritten(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v2.2.9")
    text_file(machine.main.parent / "conf.d/ours.toml", f"version = 2\n{CGROUPFS}")
    machine.write(f'version = 2\nimports = ["{machine.work}/etc/containerd/conf.d/*.toml"]\n')
    [fault] = machine.run("dry-run").faults
    assert "ours.toml sets SystemdCgroup = false" in fault


def test_an_imported_file_that_hides_the_main_one_s_settings_is_named(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "v2.2.9")
    (machine.main.parent / "conf.d").mkdir()
    imported = machine.main.parent / "conf.d/toolkit.toml"
    section = (
        '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{}]\nruntime_type = "io.containerd.runc.v2"\n'
    )
    imported.write_text(f"version = 3\n{section.format('nvidia')}")
    machine.write(f'version = 2\nimports = ["{machine.work}/etc/containerd/conf.d/*.toml"]\n')
    [fault] = machine.run("dry-run").faults
    assert "conf.d/toolkit.toml, " in fault and "set SystemdCgroup = true" in fault
    # The remedy helps.
    imported.write_text(f"{imported.read_text()}{section.format('runc.options')}SystemdCgroup = true\n")
    assert machine.run("dry-run") == engine_files.DryRun()


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
def test_a_file_that_cannot_be_edited_is_left_as_it_is(tmp_path: Path, before: str, fault: str) -> None:
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
    assert "; set KillMode=process" in said
    assert machine.main.read_text() == "version = 2\n"


def test_if_containerd_does_not_accept_a_file_the_former_one_is_restored(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "1.7.24", shim=True, restart="exit 1")
    machine.write("version = 2\n")
    with pytest.raises(AssertionError):
        machine.run("apply")
    assert machine.main.read_text() == "version = 2\n"


def asked(folder: Path, question: str, engine: str) -> list[str]:
    """What a function of the shared part prints; the engine's programs are in this folder."""
    text = f"{engine_files.SHARED}engine=$1\n{question}\n"
    return sh(text, engine, programs=folder)


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ("2 false", ['would stop 2 containers; set "live-restore": true in /etc/docker/daemon.json, or stop them']),
        ("2 true", []),
        ("0 false", []),
    ],
)
def test_a_restart_of_docker_stops_containers_unless_live_restore_is_on(
    tmp_path: Path, info: str, reason: list[str]
) -> None:
    program(tmp_path / "docker", f"echo {info}")
    assert asked(tmp_path, "stopped_by_restart", "docker") == reason


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("control-group", True),
        pytest.param("mixed", True, id="containerd-7076"),
        pytest.param("process", False, id="containerd-386"),
        ("none", False),
    ],
)
def test_a_restart_of_containerd_stops_containers_by_its_kill_mode(tmp_path: Path, mode: str, told: bool) -> None:
    program(tmp_path / "pgrep", "exit 0")
    program(tmp_path / "systemctl", f"echo {mode}")
    said = [f"with KillMode={mode} in its unit would stop all containers; set KillMode=process"]
    assert asked(tmp_path, "stopped_by_restart", "containerd") == (said if told else [])


@pytest.mark.parametrize(
    ("engine", "docker", "shims", "run"),
    [
        ("docker", "echo 0", True, False),
        ("docker", "echo 2", False, True),
        ("docker", "exit 1", True, True),
        ("docker", "exit 1", False, False),
        ("containerd", "echo 2", False, False),
        ("containerd", "echo 0", True, True),
    ],
)
def test_containers_of_a_docker_that_does_not_answer_are_known_by_their_processes(
    tmp_path: Path, engine: str, docker: str, shims: bool, run: bool
) -> None:
    program(tmp_path / "docker", docker)
    program(tmp_path / "pgrep", "exit 0" if shims else "exit 1")
    assert asked(tmp_path, "containers_run", engine) == (["running"] if run else [])


def test_a_file_that_is_a_link_out_of_etc_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").symlink_to(tmp_path / "elsewhere.toml")
    (tmp_path / "elsewhere.toml").write_text("version = 2\n")
    # Without the check it would mount over this machine's own /tmp and /etc.
    text = f"{engine_files.SHARED}mount() {{ echo mounted; exit 0; }}\n"
    [fault] = sh(f"{text}mode=dry-run engine=containerd main=$1 own=\noverlay\n", tmp_path / "config.toml")
    link = f"{tmp_path}/config.toml is {tmp_path}/elsewhere.toml"
    assert fault.startswith(f"fault containerd: {link}, a file outside")
