"""Programs for tests: from PATH, or else unpacked from Debian's packages, which are fetched once. Nothing is installed."""

import os
import shutil
from functools import cache
from pathlib import Path

import pytest

from lab.cluster.programs import found_in, runnable
from lab.errors import LabError


@cache
def program(package: str, path: str) -> tuple[Path, dict[str, str]]:
    """A program and the environment that it needs. If PATH does not have it and it cannot be fetched, the test is skipped.

    :param path: the program's path in the package.
    """
    name = Path(path).name
    installed = shutil.which(name)
    if installed:
        return Path(installed), dict(os.environ)
    try:
        folder = runnable(package)
    except LabError as error:
        pytest.skip(f"{name} is not installed, and Debian's {package} cannot be fetched: {error.what.splitlines()[0]}")
    return folder / path, {**os.environ, **found_in(folder)}
