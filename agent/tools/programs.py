"""Other programs, run without a shell and with a deadline; one that hangs in the kernel is left behind, not waited for."""

from __future__ import annotations

import os
import subprocess
import tempfile

from attrs import frozen


@frozen
class Ran:
    """What a program printed, both streams together; ``code`` is None if it did not end in time."""

    code: int | None
    output: str


def run(command: list[str], timeout: float, largest: int = 8 << 20) -> Ran:
    """Run a program.

    :param timeout: seconds; then it is killed.
    :param largest: bytes of output that are kept: the last ones.
    :raises FileNotFoundError: there is no such program.
    """
    # A file, not a pipe: whatever it has said by its deadline is kept, and no reading can hang.
    with tempfile.TemporaryFile() as output:
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
