"""Runs a check in a child process, in a network namespace of its own on this machine's kernel."""

from __future__ import annotations

import multiprocessing
import subprocess
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from bench.namespace import enter


def check_in_namespace(setup: str, check: Callable[[], None], within: float) -> None:
    """Fail if the check fails or takes more than ``within`` seconds. Skip the test if no namespace can be made here.

    ``setup``: a shell script that makes the namespace's devices; it may use mounts.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_run, args=(setup, check, theirs))
    process.start()
    how, why = ours.recv() if ours.poll(within) else ("failed", "it did not come back")
    process.join()
    if how == "skipped":
        pytest.skip(why)
    assert how == "passed", why


def _run(setup: str, check: Callable[[], None], ours: Connection) -> None:
    try:
        enter()
        subprocess.run(["sh", "-euc", setup], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        ours.send(("skipped", f"no network namespace can be made here: {error}"))
        return
    try:
        check()
    except BaseException:
        ours.send(("failed", traceback.format_exc()))
    else:
        ours.send(("passed", ""))
