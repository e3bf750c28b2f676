"""Runs a test in a child process, in a network namespace of its own on this machine's kernel."""

import functools
import multiprocessing
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import ParamSpec

import pytest

from bench.namespace import enter

P = ParamSpec("P")


def in_namespace(setup: str, within: float = 60) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Fail the test if it takes more than ``within`` seconds there. Skip it if no namespace can be made here.

    ``setup``: a shell script that makes the namespace's devices; it may use mounts.
    """

    def decorated(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*arguments: P.args, **named: P.kwargs) -> None:
            ours, theirs = multiprocessing.Pipe()
            check = functools.partial(test, *arguments, **named)
            process = multiprocessing.get_context("fork").Process(target=_run, args=(setup, check, theirs))
            process.start()
            how, why = ours.recv() if ours.poll(within) else ("failed", "it did not come back")
            process.join()
            if how == "skipped":
                pytest.skip(why)
            assert how == "passed", why

        return run

    return decorated


def _run(setup: str, check: Callable[[], None], ours: Connection) -> None:
    try:
        enter()
        sh(setup)
    except (OSError, subprocess.CalledProcessError) as error:
        ours.send(("skipped", f"no network namespace can be made here: {error}"))
        return
    try:
        check()
    except BaseException:
        ours.send(("failed", traceback.format_exc()))
    else:
        ours.send(("passed", ""))


def sh(script: str) -> None:
    """Run a shell script. The first command that fails ends it, and raises."""
    subprocess.run(["sh", "-euc", script], check=True)


@contextmanager
def pod(*unshared: str, setup: str = "true") -> Iterator[str]:
    """A process in a network namespace below the present one, after a shell script there, by its number."""
    # It ends at the latest with this process, which has the other end of its input.
    command = ["unshare", "--net", *unshared, "sh", "-c", f"{setup} && echo made && exec cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as made:
        assert made.stdout is not None
        assert made.stderr is not None
        try:
            if made.stdout.readline() != b"made\n":
                pytest.skip(f"no such namespace can be made here: {made.stderr.read().decode()}")
            yield str(made.pid)
        finally:
            made.kill()


def ip(*words: str, of: str = "") -> None:
    """Run ip(8), in a pod's namespace if one is given."""
    subprocess.run([*(["nsenter", "-t", of, "-n"] if of else []), "ip", *words], check=True)
