"""Runs programs without a shell and with a deadline. A program that hangs in the kernel is not waited for."""

from __future__ import annotations

import os
import subprocess

from attrs import frozen


@frozen
class Ran:
    """A program's output, both streams together, and its exit code. ``code`` None: it did not end in time."""

    code: int | None
    output: str


def run(command: list[str], timeout: float, largest: int = 8 << 20) -> Ran:
    """Run a program.

    :param timeout: seconds; then it is killed.
    :param largest: how many of the last bytes of output are kept.
    :raises FileNotFoundError: there is no such program.
    """
    # A file instead of a pipe keeps the output until the deadline, and reading it cannot hang. It is in memory, since the
    # node's disks may be full or read-only: then a diagnosis is needed most.
    with os.fdopen(os.memfd_create("output"), "r+b") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - largest))
        return Ran(code, output.read().decode(errors="replace"))
