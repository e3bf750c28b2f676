"""`python -m lab` without a running node: its messages, which say what to do next, and its exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from attrs import evolve

from lab import fleet, instance, logs
from lab.errors import LabError
from lab.image import Image
from lab.lock import exclusive
from lab.node import wait
from lab.qemu.accelerator import TCG
from tests.programs import failure, success
from tests.stand_ins import program, text_file
from tests.unit.lab.test_time_source import free_port

ROOT = Path(__file__).parents[3]


def lab(state: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "TRACKBED_LAB": "t", **more}
    command = [sys.executable, "-m", "lab", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def stopped(state: Path, text: str = "") -> None:
    """A lab that was up, and whose nodes are off."""
    folder = state / "trackbed" / "lab" / "t"
    folder.mkdir(parents=True)
    plan = {"image": str(state / "image"), "ports": {"node1": 1, "node2": 2}}
    (folder / "lab.json").write_text(text or json.dumps(plan))


@pytest.mark.parametrize(
    ("plan", "command", "status", "message"),
    [
        (None, "status --ready", 1, "`python -m lab up` starts it"),
        *(
            (None, command, 1, "lab: lab t is down\n`python -m lab up` starts it.")
            for command in ("power-cut node1", "cluster up", "cluster join")
        ),
        ("", "snapshot node1 before", 1, "lab: node1 is off\n`python -m lab power-on node1` boots it."),
        ("", "power-on node3", 2, "lab: the lab has no node3\n`python -m lab status` shows its nodes."),
        ("", "up --nodes 3", 2, "lab: lab t has 2 nodes\nRun `python -m lab down`, then `up`."),
        ("", "restore node1 1st", 2, "Start with a letter"),
        ("", "cluster join", 1, "the control plane of lab t does not run\n`python -m lab cluster up` starts it."),
        ("{", "status", 1, "Run `python -m lab down`"),
    ],
)
def test_a_command_that_cannot_be_done_says_what_to_do(
    state: Path, plan: str | None, command: str, status: int, message: str
) -> None:
    if plan is not None:
        stopped(state, plan)
    failed = lab(state, *command.split())
    assert failed.returncode == status
    assert message in failed.stderr
    # A command that is refused makes nothing.
    assert plan is not None or not command.startswith("cluster") or list(state.iterdir()) == []
    assert not (state / "trackbed" / "lab" / "t" / "cluster").exists()


def test_status_says_of_each_node_what_to_do(state: Path) -> None:
    stopped(state)
    asked = failure(lab(state, "status", "--ready"))
    for name in ("node1", "node2"):
        assert f"{name} is off: `python -m lab power-on {name}` boots it" in asked


@pytest.mark.parametrize("command", ["status", "up", "down"])
def test_a_folder_that_cannot_be_used_is_one_message_with_its_path(state: Path, command: str) -> None:
    (state / "taken").write_text("")
    failed = lab(state / "taken", command)
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"lab: Not a directory: {state}/taken/trackbed/lab/t")
    assert "XDG_STATE_HOME" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_host_that_is_no_debian_is_named(state: Path) -> None:
    (state / "bin").mkdir()
    failed = lab(state, "up", PATH=str(state / "bin"))
    assert failed.returncode == 1
    assert failed.stderr.startswith("lab: this host has no dpkg\n")
    assert "Debian 12" in failed.stderr


def test_a_lab_whose_control_plane_is_damaged_can_be_taken_down(state: Path) -> None:
    stopped(state)
    cluster = state / "trackbed" / "lab" / "t" / "cluster"
    text_file(cluster / "ports.json", "")
    assert f"lab: {cluster}/ports.json is damaged" in failure(lab(state, "cluster", "up"))
    assert lab(state, "down").returncode == 0
    assert not cluster.exists()


# Answers as QEMU does on a full disk: on its monitor, and on its test port, where no NIC has VFs. It has stopped the guest.
FULL = """\
import json, socket, sys, threading
from pathlib import Path

folder = Path(sys.argv[1]).parent

def serve(name, greeting, answer):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / name))
        server.listen()
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rw") as lines:
                lines.write(greeting)
                lines.flush()
                for line in lines:
                    lines.write(answer(line) + "\\n")
                    lines.flush()

def monitor(line):
    asked = json.loads(line)
    if asked["execute"] == "query-status":
        return json.dumps({"return": {"status": "io-error", "running": False}})
    saves = asked["arguments"].get("command-line", "").startswith("savevm")
    return json.dumps({"return": "Error: No space left on device" if saves else ""})

threading.Thread(target=serve, args=("qtest.sock", "", lambda line: "OK 0x0"), daemon=True).start()
serve("monitor.sock", "{}\\n", monitor)
"""


@contextmanager
def full(state: Path) -> Iterator[Path]:
    """A lab whose node1 has no room on this host's disk; yields the node's folder."""
    stopped(state)
    folder = state / "trackbed" / "lab" / "t" / "node1"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", FULL, folder / "qemu.pid"]) as qemu:
        try:
            (folder / "qemu.pid").write_text(str(qemu.pid))
            wait(lambda: (folder / "monitor.sock").exists() and (folder / "qtest.sock").exists(), 60, "the sockets")
            yield folder
        finally:
            qemu.kill()


def test_a_node_that_qemu_has_stopped_on_a_full_disk_says_so(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full(state) as folder:
        asked = lab(state, "status", "--ready")
        monkeypatch.setenv("XDG_STATE_HOME", str(state))
        node = fleet.nodes("t")[0]
        with pytest.raises(LabError, match="node1 has been stopped: this host had no room for its disk") as failed:
            node.wait_ssh()
    assert asked.returncode == 1
    assert f"node1 has been stopped: make room in {folder}, then `python -m lab power-cut node1`" in asked.stderr
    assert failed.value.remedy.startswith(f"Make room in {folder}")


# As an emulated guest was seen to do: its first boot shows a login and never answers.
HANGS_ONCE = """\
#!{python}
import os, re, signal, socket, sys
from pathlib import Path
pid = Path(sys.argv[sys.argv.index("-pidfile") + 1])
first = not pid.exists()
child = os.fork()
if child:
    # QEMU's -daemonize returns once its process id is in the file.
    pid.write_text(str(child))
    os._exit(0)
os.setsid()
for output in 1, 2:
    os.close(output)
if first:
    signal.pause()
port = re.search(r"hostfwd=tcp:127.0.0.1:(\\d+)-", " ".join(sys.argv))[1]
with socket.create_server(("127.0.0.1", int(port))) as sshd:
    while True:
        sshd.accept()[0].sendall(b"SSH-2.0-x")
"""


def test_a_node_that_never_answers_after_its_boot_is_booted_once_more(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"qemu-system-x86_64": HANGS_ONCE.format(python=sys.executable), "ssh": "#!/bin/sh\n"}.items():
        (state / name).write_text(text)
        (state / name).chmod(0o755)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setenv("PATH", f"{state}:{os.environ['PATH']}")
    stopped(state)
    image = Image(state / "image")
    image.folder.mkdir()
    for file in (image.disk, image.kernel, image.initrd):
        file.touch()
    node = evolve(fleet.nodes("t")[0], ssh_port=instance.free_port(), accelerator=evolve(TCG, boot_s=5.0))
    node.instance.make_keys((node.machine,))
    node.overlay.touch()
    try:
        node.boot()
        assert node.answers()
    finally:
        node.power_cut()
    assert "node1: ssh: nothing after 5 s; " in capsys.readouterr().err


def test_the_logs_of_a_node_that_does_not_answer_are_what_this_host_has(state: Path) -> None:
    with full(state) as folder:
        (folder / "console.log").write_text("the console's output")
        collected = lab(state, "logs", "node1")
    assert collected.returncode == 0
    assert "node1 does not answer" in collected.stderr
    assert [(file.name, file.read_text()) for file in Path(collected.stdout.strip()).iterdir()] == [
        ("console.log", "the console's output")
    ]


def test_the_logs_of_a_node_on_which_no_command_runs_say_why(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    with full(state), socket.create_server(("127.0.0.1", 0)) as sshd:
        node = evolve(fleet.nodes("t")[0], ssh_port=sshd.getsockname()[1])
        # It greets, and then hangs.
        threading.Thread(target=lambda: sshd.accept()[0].sendall(b"SSH-2.0-x"), daemon=True).start()
        assert logs.keep(node, state / "logs")
    assert "ssh" in (state / "logs" / "journal.txt").read_text()


def test_the_operators_checks_judge_a_new_login(state: Path) -> None:
    stopped(state)
    ssh = state / "ssh"
    program(ssh, f'echo "$*" >> {state}/asked')
    folder = state / "trackbed" / "lab" / "t"
    # Only the first node has a shared connection.
    text_file(folder / "node1" / "ssh.sock")
    success(lab(state, "check", "--", "--version", PATH=f"{state}:{os.environ['PATH']}"))
    assert [line.split()[2:] for line in (state / "asked").read_text().splitlines()] == [["-O", "stop", "node1"]]


def test_a_node_whose_start_was_interrupted_gets_its_time_source(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    with full(state):
        node = evolve(fleet.nodes("t")[0], ssh_port=free_port())
        node.power_on()
        wait(lambda: is_taken(node.ssh_port), 60, "the time source")


def test_a_lab_that_is_up_gets_the_time_source_that_an_interrupted_start_left_out(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    with full(state), socket.create_server(("127.0.0.1", 0)) as sshd:
        port = sshd.getsockname()[1]
        (state / "trackbed" / "lab" / "t" / "lab.json").write_text(
            json.dumps({"image": str(state / "image"), "ports": {"node1": port}})
        )
        threading.Thread(target=lambda: sshd.accept()[0].sendall(b"SSH-2.0-x"), daemon=True).start()
        assert fleet.up("t") is False
        wait(lambda: is_taken(port), 60, "the time source")


def is_taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def test_a_snapshot_that_could_not_be_saved_does_not_exist(state: Path) -> None:
    with full(state) as folder:
        (folder / "before.snapshot").write_text("{}")
        failed = lab(state, "snapshot", "node1", "before")
    assert failed.returncode == 1
    assert "savevm before: Error: No space left" in failed.stderr
    assert "node1 has no snapshot 'before'" in failure(lab(state, "restore", "node1", "before"), 2)


def test_an_interrupted_up_says_that_nodes_may_run(state: Path) -> None:
    folder = state / "trackbed" / "lab" / "t"
    folder.mkdir(parents=True)
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "TRACKBED_LAB": "t"}
    command = [sys.executable, "-m", "lab", "up"]
    with (
        exclusive(folder / "lock", "nobody"),
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as up,
    ):
        assert up.stderr is not None
        assert "another command is changing lab t" in up.stderr.readline()
        up.send_signal(signal.SIGINT)
        rest = up.stderr.read()
    assert up.returncode == 1
    assert "interrupted: `python -m lab up` " in rest


def test_an_error_without_a_remedy_of_its_own_says_where_to_look() -> None:
    program = (
        "from lab import __main__ as lab\n"
        "from lab.errors import LabError\n"
        "@lab.main.command()\n"
        "def break_it() -> None:\n"
        "    raise LabError('it broke')\n"
        "lab.cli()\n"
    )
    command = [sys.executable, "-c", program, "break-it"]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[0] == "lab: it broke"
    assert "`python -m lab logs NODE` collects" in failed.stderr


@pytest.mark.slow
def test_the_suites_use_pythons_own_subprocesses_and_threads() -> None:
    """`pyinfra_cli` replaces them by gevent's, in which a read that hangs stops every thread of the suite, and pytest-xdist."""
    load = (
        "import importlib, pathlib, sys\n"
        "for file in sorted(pathlib.Path().glob('tests/[cdl]*/**/[!_]*.py')):\n"
        "    importlib.import_module('.'.join(file.with_suffix('').parts))\n"
        "    assert 'pyinfra_cli' not in sys.modules, file\n"
    )
    success(subprocess.run([sys.executable, "-c", load], cwd=ROOT, capture_output=True, text=True, check=False))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TRACKBED_LAB_DEBIAN", "11", "no such Debian Give 12, 12-backports, 13, 13-backports."),
        ("TRACKBED_LAB_LIKE", "rocky-8", "no such distribution Give rocky-9, ubuntu-22.04."),
    ],
)
def test_a_system_that_the_lab_does_not_know_is_refused_before_anything_is_built(
    state: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert f"{variable}={value}: {message}" in failure(lab(state, "up"), 2)


@pytest.mark.parametrize("name", ["bookworm-1a", "trixie-backports-1a", "trixie-backports-like-rocky-9-1a"])
def test_an_image_s_name_says_its_debian(name: str) -> None:
    assert Image(Path(f"image-{name}")).debian.name == name.partition("-like-")[0].removesuffix("-1a")
