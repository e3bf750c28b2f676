"""Starts the processes that work beside a node's QEMU and end with it: its time source, and the splitter of its frames."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab import time_source
from lab.qemu import splitter


def start_time_source(port: int, qemu: int, log: Path) -> None:
    """Start a process that answers on a UDP port of the loopback until QEMU has ended, unless it runs."""
    _start(time_source.__file__, [str(port), str(qemu)], log)


def start_splitter(copies: Mapping[Path, Sequence[Path]], qemu: int, log: Path) -> None:
    """Start a process that copies from each socket to those of the other nodes until QEMU has ended, unless it runs."""
    named = {str(one): [str(other) for other in others] for one, others in copies.items()}
    _start(splitter.__file__, [json.dumps(named), str(qemu)], log)


def _start(program: str, arguments: Sequence[str], log: Path) -> None:
    command = [sys.executable, "-I", program, *arguments]
    if _runs(command):
        return
    with log.open("a") as messages:
        # setsid --fork: the process outlives this command, and nobody has to wait for it.
        words = ["setsid", "--fork", *command]
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, check=True)


def _runs(command: Sequence[str]) -> bool:
    """Whether a process was started by these words, among which is the process id of its QEMU."""
    wanted = b"".join(os.fsencode(word) + b"\0" for word in command)
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if process.read_bytes() == wanted:
                return True
        except OSError:
            continue
    return False
