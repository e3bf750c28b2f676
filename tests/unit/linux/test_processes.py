"""The processes of this machine, by their names."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.linux.processes import LinuxProcesses
from tests.contract.asking import soon

EXECUTABLE = "trackbed-shim-under-test"
COMMAND = EXECUTABLE[:15]
"""The part of a name that the kernel keeps. The whole name is in the command line, and reading that may hang."""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    program = tmp_path / EXECUTABLE
    shutil.copy(str(shutil.which("sleep")), program)
    with subprocess.Popen(["sh", "-c", f"ulimit -S -l 64; exec {program} 60"]) as made:
        soon(lambda: COMMAND in LinuxProcesses().running() or None, COMMAND)
        yield made
        made.kill()


def test_a_process_is_found_by_its_command_name(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    processes = LinuxProcesses()
    assert processes.arguments(COMMAND) == ((str(tmp_path / EXECUTABLE), "60"),)
    assert processes.memlock(frozenset({COMMAND, "no-such-runtime"})) == {COMMAND: 64 * 1024}
    processes.hang_up(COMMAND)
    assert process.wait(20) == -signal.SIGHUP


def test_who_holds_a_file_open_is_named(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    held = str(tmp_path / "held")
    descriptor = os.open(held, os.O_CREAT | os.O_RDWR)
    try:
        (holder,) = LinuxProcesses().holders(frozenset({held, str(tmp_path / "free")}))[held]
        assert holder.endswith(f"(pid {os.getpid()})")
    finally:
        os.close(descriptor)


@contextmanager
def elsewhere(script: str) -> Iterator[int]:
    """A process with mounts of its own, in which the script is run."""
    command = f"{script} && echo ready && exec sleep 60"
    with subprocess.Popen(["unshare", "-rm", "sh", "-c", command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                pytest.skip("no mount namespace can be made here")
            yield process.pid
        finally:
            process.kill()


def held_by(pid: int, *paths: str) -> list[str]:
    holders = LinuxProcesses().holders(frozenset(paths))
    return [path for path in paths if any(each.endswith(f"(pid {pid})") for each in holders.get(path, ()))]


def test_a_device_node_is_known_by_its_number_whatever_its_path_is() -> None:
    """In a container uverbs3 may be called uverbs0. /dev/pts/ptmx and /dev/ptmx are two nodes of one device."""
    with elsewhere("mount --bind /dev/zero /dev/full && exec 8</dev/full") as pid:
        assert held_by(pid, "/dev/full", "/dev/zero") == ["/dev/zero"]
    descriptor = os.open("/dev/pts/ptmx", os.O_PATH)
    try:
        assert held_by(os.getpid(), "/dev/ptmx") == ["/dev/ptmx"]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("mode", "held"), [("<", []), ("<>", ["/dev/ptp99"])])
def test_a_ptp_clock_is_held_by_who_may_steer_it(mode: str, held: list[str]) -> None:
    with elsewhere(f"mount -t tmpfs dev /dev && touch /dev/ptp99 && exec 8{mode}/dev/ptp99") as pid:
        assert held_by(pid, "/dev/ptp99") == held
