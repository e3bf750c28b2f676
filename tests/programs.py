"""What a program that has ended said: of one that succeeded, and of one that failed."""

import subprocess


def success(done: subprocess.CompletedProcess[str]) -> str:
    """The standard output of a program that must have succeeded."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def failure(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The errors, in one line, of a program that must have failed with this exit status, and without a traceback."""
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())
