"""What a script has, whatever the login has."""

import os
from pathlib import Path

import pytest

from tests.deploy.scripts import sh
from tests.stand_ins import program


@pytest.mark.parametrize("path", ["/usr/bin:/bin", "/usr/local/bin:/usr/bin:/bin:/usr/local/games", "/bin"])
def test_a_program_in_sbin_is_found_whatever_the_users_path_is(path: str) -> None:
    # As sudo leaves it without secure_path.
    assert sh("command -v ldconfig chroot", PATH=path)
    assert sh("if modinfo --version >/dev/null 2>&1; then echo there; fi", PATH=path) == ["there"]


def test_programs_speak_english_whatever_the_users_language_is(tmp_path: Path) -> None:
    said = 'case "$LC_ALL" in C*) echo "Could not get lock" ;; *) echo "Konnte Sperre nicht bekommen" ;; esac'
    program(tmp_path / "apt-get", said)
    german = {"LC_ALL": "de_DE.UTF-8", "LANG": "de_DE.UTF-8", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert sh("apt-get", **german) == ["Could not get lock"]
    assert sh("printf '%s\\n' a B | sort; awk 'BEGIN { print 1 / 2 }'", **german) == ["B", "a", "0.5"]
