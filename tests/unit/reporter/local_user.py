"""Code that runs as an unprivileged user of this machine, in a process of its own."""

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NOBODY = 65534
DEADLINE_S = 60


def as_nobody(act: Callable[[], Any]) -> Any:
    """What ``act`` returns when nobody runs it; an exception comes back as its repr."""
    ours, theirs = multiprocessing.Pipe()

    def run() -> None:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            theirs.send(act())
        except Exception as error:
            theirs.send(repr(error))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    assert ours.poll(DEADLINE_S), "it did not come back"
    process.join()
    return ours.recv()


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that everybody can reach, which pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="trackbed-public-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
