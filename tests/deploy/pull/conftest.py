import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.pull.keys import make_key


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two key pairs: ours and another's."""
    folder = tmp_path_factory.mktemp("k")
    make_key(folder / "ours", folder / "ours.gpg")
    make_key(folder / "other", folder / "other.gpg")
    yield folder
    for home in ("ours", "other"):
        subprocess.run(["gpgconf", "--homedir", folder / home, "--kill", "all"], check=False)
