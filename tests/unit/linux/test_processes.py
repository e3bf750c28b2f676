"""The processes of this machine, by their names."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
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
