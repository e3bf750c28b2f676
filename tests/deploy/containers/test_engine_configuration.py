"""Parts of templates/engine-configuration.sh, run by a shell.

tests/lab/containers/test_container_runtime.py runs all of it on a node.
"""

from pathlib import Path

import pytest

from tasks.common import archive
from tasks.common.commands import script
from tasks.containers import engine_files
from tests.deploy.scripts import ran, sh
from tests.stand_ins import program, text_file

SCRIPT = (archive.ROOT / "templates" / "engine-configuration.sh").read_text()
CHOOSE = (
    SCRIPT[SCRIPT.index("has() ") : SCRIPT.index('command -v "$daemon"')]
    + SCRIPT[SCRIPT.index("view present") : SCRIPT.index("\ncase $engine in\ndocker)\n  if [")]
)
VALIDATE = SCRIPT[SCRIPT.index("validate() {") : SCRIPT.index("has() ")]
KEEP_IMPORTS = SCRIPT[SCRIPT.index("imported() {") : SCRIPT.index("configure() {")]
CONFIGURE = SCRIPT[SCRIPT.index("configure() {") : SCRIPT.index("# An empty runtimeArgs")]
LOADED = SCRIPT[SCRIPT.index("# Version 1.0.0") : SCRIPT.index("active=$(")]
REMOVED = SCRIPT[SCRIPT.index("if left_by_1_0_0") : SCRIPT.index('[ "$active" = active ] || exit 0\n\nif')]
LATER = SCRIPT[SCRIPT.index("# CRI-O reads its drop-ins") : SCRIPT.index("case $engine in\ndocker)\n  if [")]
USABLE = SCRIPT[SCRIPT.index("usable() {") : SCRIPT.index("# Only engines without root")]
CLOSED = SCRIPT[SCRIPT.index("find_closed_gpus() {") : SCRIPT.index("comm -13 present")]
STATE = SCRIPT[SCRIPT.index("active=$(") : SCRIPT.index('if [ "$active" = active ] && ! {')]
FIND_CONTAINERD = SCRIPT[SCRIPT.index("ELSEWHERE=") : SCRIPT.index("for snaps in")]
FIND_LOST = SCRIPT[SCRIPT.index("ours=") : SCRIPT.index("# dockerd does")]


@pytest.mark.parametrize(
    ("entry", "lost"),
    [
        ("runtimes.nvidia.runtimeArgs = []", []),
        ('runtimes.nvidia.runtimeArgs = ["--debug"]', ["runtimes.nvidia.runtimeArgs"]),
        ("runtimes.other.runtimeArgs = []", ["runtimes.other.runtimeArgs"]),
        ("runtimes.nvidia.args = []", []),
        ('default-runtime = "runc"', []),
    ],
)
def test_keys_that_nvidia_ctk_would_lose_are_found(tmp_path: Path, entry: str, lost: list[str]) -> None:
    (tmp_path / "operator").write_text(f"{entry}\n")
    (tmp_path / "result").write_text('runtimes.nvidia.path = "nvidia-container-runtime"\n')
    sh(f"{FIND_LOST}find_lost", cwd=tmp_path)
    assert [line.partition(" = ")[0] for line in (tmp_path / "lost").read_text().splitlines()] == lost


# Its default path for CRI-O is one that CRI-O does not read (github.com/NVIDIA/nvidia-container-toolkit/pull/1829).
NVIDIA_CTK = """
case "$*" in *--help) echo '   --drop-in-config string  path to the NVIDIA-specific config file to create'; exit ;; esac
for word; do case $word in --drop-in-config=*) echo made >"${word#*=}" ;; esac; done
"""


@pytest.mark.parametrize(("nvidia_ctk", "made"), [(NVIDIA_CTK, True), (":", False)], ids=["1.18", "1.17"])
@pytest.mark.parametrize("engine", ["crio", "containerd"])
def test_nvidia_ctk_writes_the_drop_in_that_the_engine_reads(
    tmp_path: Path, engine: str, nvidia_ctk: str, made: bool
) -> None:
    program(tmp_path / "bin/nvidia-ctk", nvidia_ctk)
    own = tmp_path / "99-nvidia.toml"
    text = f"{engine_files.SHARED}{CONFIGURE}\nengine={engine} main=/nowhere own=$1 default=yes cdi=no\nconfigure\n"
    done = ran(script(text, str(own)), tmp_path / "bin", tmp_path)
    assert (done.returncode == 0, own.exists()) == (made, made), done.stderr
    assert made or f"fault {engine}: nvidia-ctk makes no {own}; install nvidia-container-toolkit 1.18" in done.stdout


@pytest.mark.parametrize(("accepted", "left"), [(True, "new"), (False, "old")])
def test_the_former_drop_in_is_not_in_a_folder_of_which_cri_o_reads_every_file(
    tmp_path: Path, accepted: bool, left: str
) -> None:
    """99-nvidia.toml.previous would override 99-nvidia.toml (github.com/cri-o/cri-o/issues/6190)."""
    for root, text in (("node", "old"), ("overlay", "new")):
        text_file(tmp_path / root / "crio/crio.conf.d/99-nvidia.toml", text)
    former = (tmp_path / "node/crio/crio.conf.d/99-nvidia.toml").stat().st_ino
    for name in ("systemctl", "journalctl"):
        program(tmp_path / "bin" / name)
    real = f'real() {{ echo "{tmp_path}/node${{1#{tmp_path}/overlay}}"; }}'
    end = ":" if accepted else "give_up 'it does not start'"
    text = f"{engine_files.SHARED}{real}\nengine=crio own=$1\ninstall_files $own\n{end}"
    done = ran(script(text, f"{tmp_path}/overlay/crio/crio.conf.d/99-nvidia.toml"), tmp_path / "bin")
    assert (done.returncode == 0) is accepted, done.stderr
    drop_ins = {file.name: file.read_text() for file in (tmp_path / "node/crio/crio.conf.d").iterdir()}
    assert drop_ins == {"99-nvidia.toml": left}
    previous = tmp_path / "node/crio/99-nvidia.toml.previous"
    assert previous.exists() == accepted
    # The file itself: a power cut may leave a copy empty.
    assert not accepted or previous.stat().st_ino == former


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("99-zz.conf", '  default_runtime = "crun"', True),
        ("99-zz.conf", '  default_runtime = "nvidia"', False),
        ("99-zz.conf", '  # default_runtime = "crun"', False),
        ("10-crio.conf", '  default_runtime = "crun"', False),
    ],
)
def test_a_drop_in_of_cri_o_that_sets_another_default_runtime_afterwards_is_named(
    tmp_path: Path, name: str, text: str, refused: bool
) -> None:
    (tmp_path / "99-nvidia.toml").write_text('  default_runtime = "nvidia"')
    (tmp_path / name).write_text(f"[crio.runtime]\n{text}\n")
    shell = f"{engine_files.SHARED}engine=crio own=$1\n{LATER}refuse_later_default\n"
    done = ran(script(shell, f"{tmp_path}/99-nvidia.toml"))
    assert (done.returncode == 1, f"{tmp_path}/{name} sets" in done.stdout) == (refused, refused), done.stderr


@pytest.mark.parametrize(("engine", "pending"), [("crio", True), ("containerd", False)])
def test_a_former_drop_in_is_removed_where_cri_o_reads_it(tmp_path: Path, engine: str, pending: bool) -> None:
    own, former = tmp_path / "99-nvidia.toml", tmp_path / "99-nvidia.toml.previous"
    for file in (own, former):
        file.write_text("")
    program(tmp_path / "bin/systemctl")
    text = f'{engine_files.SHARED}real() {{ echo "$1"; }}\nengine={engine} own=$1\n{LOADED}'
    for step, code in (("loaded", pending), (REMOVED, 0), ("loaded", 0)):
        assert ran(script(f"{text}{step}", str(own)), tmp_path / "bin").returncode == code
    assert former.exists() is not pending


# As dockerd compares them (findConfigurationConflicts, daemon/config/config.go of moby).
DOCKERD = """
case "$*" in
*--validate*--add-runtime*) echo 'specified both as a flag and in the configuration file: runtimes' >&2; exit 1 ;;
*--validate*) ;;
*) exit 2 ;;
esac
"""


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        pytest.param(("--host=fd://", "--add-runtime=nvidia=/usr/bin/x"), False, id="nvidia-docker-761"),
        pytest.param(("--add-runtime", "nvidia=/usr/bin/x"), False, id="nvidia-docker-787"),
        pytest.param(("--host=fd://", "--label=a b"), True, id="without-a-runtime"),
        pytest.param(None, True, id="not-running"),
    ],
)
def test_a_file_is_checked_beside_the_arguments_of_the_running_docker(
    tmp_path: Path, arguments: tuple[str, ...] | None, accepted: bool
) -> None:
    program(tmp_path / "bin/dockerd", DOCKERD)
    program(tmp_path / "bin/systemctl", f"echo {0 if arguments is None else 42}")
    text_file(tmp_path / "proc/42/cmdline", "\0".join((str(tmp_path / "bin/dockerd"), *(arguments or ()), "")))
    text = f"main=/etc/docker/daemon.json\n{VALIDATE.replace('/proc/', f'{tmp_path}/proc/')}validate"
    checked = ran(script(text), tmp_path / "bin")
    assert (checked.returncode == 0, "specified both" not in checked.stderr) == (accepted, accepted), checked


MADE = """\
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]
  {type}
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia.options]
    BinaryName = "/usr/bin/nvidia-container-runtime"
"""
TYPE = 'runtime_type = "io.containerd.runc.v2"'


@pytest.mark.parametrize(
    ("runc", "given", "added"),
    [
        pytest.param("SystemdCgroup = true", TYPE, ["SystemdCgroup = true"], id="nvidia-container-toolkit-497"),
        pytest.param("SystemdCgroup = false", 'runtime_path = ""', [TYPE], id="nvidia-container-toolkit-1956"),
        pytest.param("SystemdCgroup = false", TYPE, [], id="cgroupfs"),
    ],
)
def test_nvidias_runtime_has_what_runc_has_in_whatever_file_that_is(
    tmp_path: Path, runc: str, given: str, added: list[str]
) -> None:
    """The main file only imports the one with runc's options, and has no entry of runc or only a part of one."""
    made = MADE.format(type=given)
    (tmp_path / "runc").write_text(
        f"[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]\n  {runc}\n"
    )
    (tmp_path / "made").write_text(made)
    (tmp_path / "config.toml").touch()
    stubs = """
        configure() { echo "$*" >>asked; cp made "$own"; }
        view() { cat runc "$own" 2>/dev/null | flat >"$1"; }
        engine=containerd main=config.toml own=99-nvidia.toml
    """
    sh(f"{engine_files.SHARED}{stubs}{FIND_LOST}{CHOOSE}", cwd=tmp_path)
    assert (tmp_path / "asked").read_text() == "\n"
    lines = (tmp_path / "99-nvidia.toml").read_text().splitlines()
    assert [line for line in lines if line not in made.splitlines()] == added


OURS = '"/etc/containerd/conf.d/*.toml"'


@pytest.mark.parametrize(
    ("operators", "made", "kept"),
    [
        pytest.param('imports = ["/foo/*.toml"]', OURS, f'"/foo/*.toml", {OURS}', id="nvidia-container-toolkit-1382"),
        ("imports = [\n  '/a/*.toml', # mine\n  '/b.toml'\n]", OURS, f'"/b.toml", "/a/*.toml", {OURS}'),
        ('imports = ["/a/*.toml"]', f'"/a/*.toml", {OURS}', f'"/a/*.toml", {OURS}'),
        ("", OURS, OURS),
    ],
)
def test_files_that_the_operator_imports_stay_imported(tmp_path: Path, operators: str, made: str, kept: str) -> None:
    (tmp_path / "original").write_text(f'{operators}\nversion = 2\n[plugins]\nname = ["c"]\n')
    (tmp_path / "main").write_text(f"imports = [{made}]\nversion = 2\n")
    sh(f"main=main\n{KEEP_IMPORTS}keep_imports", cwd=tmp_path)
    assert (tmp_path / "main").read_text() == f"imports = [{kept}]\nversion = 2\n"


NOT_RELATIVE = 'nvidia-container-cli.ldconfig value "/usr/sbin/ldconfig" is not host-relative'


@pytest.mark.parametrize(
    ("said", "is_fault"),
    [
        pytest.param(f"error loading config: {NOT_RELATIVE}", True, id="nvidia-container-toolkit-830"),
        ("no runtime binary found from candidate list", False),  # it is found by its whole path, as in CRI-O
        ("NVIDIA Container Runtime version 1.18.1", False),
    ],
)
def test_a_file_of_the_runtime_s_own_that_it_does_not_accept_is_named(
    tmp_path: Path, said: str, is_fault: bool
) -> None:
    program(tmp_path / "bin/nvidia-container-runtime", f"echo '{said}' >&2; exit 1")
    stubs = 'fault() { echo "fault $*"; exit 0; }\nlast_output() { tail -n 1 output; }\n'
    faults = sh(f"{stubs}{USABLE}", programs=tmp_path / "bin", cwd=tmp_path)
    assert any(f"config.toml: {said};" in fault for fault in faults) is is_fault


@pytest.mark.parametrize(
    ("state", "said"),
    [("active", ""), ("failed", "fault docker: it has failed"), ("inactive", "warning docker is inactive: ")],
)
def test_an_engine_that_does_not_run_is_named(tmp_path: Path, state: str, said: str) -> None:
    program(tmp_path / "bin/systemctl", f"echo {state}; [ {state} = active ]")
    lines = sh(f"{engine_files.SHARED}engine=docker mode=dry-run\n{STATE}", programs=tmp_path / "bin")
    assert [line[: len(said)] for line in lines] == ([said] if said else [])


@pytest.mark.parametrize(
    ("unit", "named"),
    [
        pytest.param("k0sworker", True, id="k0s-3272"),
        pytest.param("snap.microk8s.daemon-containerd", True, id="microk8s-3959"),
        pytest.param("k3s-agent", True, id="k3s-5860"),
        pytest.param("rke2-server", True, id="gpu-operator-473"),
        ("containerd", False),
        ("docker", False),
    ],
)
def test_the_containerd_of_another_unit_is_named(tmp_path: Path, unit: str, named: bool) -> None:
    for number, each in enumerate(("containerd", unit, unit), 1):
        (tmp_path / f"proc/{number}").mkdir(parents=True)
        (tmp_path / f"proc/{number}/cgroup").write_text(f"1:name=systemd:/\n0::/system.slice/{each}.service\n")
    program(tmp_path / "bin/pgrep", "printf '%s\\n' 1 2 3 4")
    program(tmp_path / "bin/containerd")
    done = ran(
        script(f"{engine_files.SHARED}engine=containerd\n{FIND_CONTAINERD}"), tmp_path / "bin", MACHINE=str(tmp_path)
    )
    warnings = engine_files.parse(done.stdout.splitlines()).warnings
    assert [each.partition(": leave containerd out of container_runtime.engines; ")[0] for each in warnings] == (
        [f"the containerd of {unit} is another one"] if named else []
    ), done.stderr


def test_a_node_without_containerd_is_told_where_those_of_kubernetes_find_the_runtime(tmp_path: Path) -> None:
    text = f"{engine_files.SHARED}mode=dry-run engine=containerd\ncommand() {{ return 1; }}\n{FIND_CONTAINERD}"
    [fault] = engine_files.parse(ran(script(text)).stdout.splitlines()).faults
    for each in ("default-runtime in config.yaml", "/etc/k0s/containerd.d", "containerd-template.toml"):
        assert each in fault


@pytest.mark.parametrize(
    ("version", "text", "closed"),
    [
        pytest.param("1.14.6", "no-cgroups = true", True, id="nvidia-container-toolkit-381"),
        pytest.param("1.17.4", 'mode = "auto"\nno-cgroups = true', True, id="nvidia-container-toolkit-580"),
        pytest.param("1.18.1", 'mode="legacy"\n  no-cgroups=true # for podman', True, id="nvidia-container-toolkit-85"),
        ("1.18.1", 'mode = "auto"\nno-cgroups = true', False),
        ("1.17.4", 'mode = "cdi"\nno-cgroups = true', False),
        ("1.17.4", "#no-cgroups = true", False),
        ("1.17.4", "no-cgroups = false", False),
    ],
)
def test_a_setting_that_closes_gpus_to_containers_is_named(
    tmp_path: Path, version: str, text: str, closed: bool
) -> None:
    text_file(tmp_path / "etc/nvidia-container-runtime/config.toml", f"[nvidia-container-cli]\n{text}\n")
    program(tmp_path / "bin/nvidia-ctk", f"echo NVIDIA Container Toolkit CLI version {version}; echo commit: abc")
    done = ran(script(f"engine=docker\n{CLOSED}"), tmp_path / "bin", MACHINE=str(tmp_path))
    warnings = engine_files.parse(done.stdout.splitlines()).warnings
    assert [each.partition(" = ")[0] for each in warnings] == (
        ["/etc/nvidia-container-runtime/config.toml has no-cgroups"] if closed else []
    ), done.stderr
