"""The specs of each released version of this MAJOR are read: those of its golden plans, by the tags of this checkout."""

import subprocess
from pathlib import Path

import pytest

from agent.runtime import version
from agent.spec.node import parse

ROOT = Path(__file__).parents[3]
GOLDENS = "tests/unit/kinds/goldens"


def git(*words: str) -> list[str]:
    """The lines that git prints; none where this is no checkout."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


# HEAD: before the first release there is no tag. What is not committed yet must read it, too.
RELEASES = ["HEAD", *git("tag", "--list", f"v{version().partition('.')[0]}.*")]


@pytest.mark.parametrize("release", RELEASES)
def test_a_spec_that_a_release_accepts_is_accepted(release: str) -> None:
    files = [path for path in git("ls-tree", "-r", "--name-only", release, GOLDENS) if path.endswith("/spec.json")]
    if not git("rev-parse", "--git-dir"):
        pytest.skip("this is no checkout")
    assert len(files) > 10
    for path in files:
        parse("\n".join(git("show", f"{release}:{path}")), f"{release}:{path}")
