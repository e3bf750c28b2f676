"""The same commit gives the same archive, to the byte, wherever it is built."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from hashlib import sha256
from pathlib import Path

from tasks.common import archive

COPIED = ("agent", "cli", "tasks", "fleet", "templates", "requirements", "pyproject.toml")
BUILD = """
import os, sys
os.umask(int(sys.argv[1], 8))
from tasks.common import archive
print(archive.build("x86_64"))
"""
WAYS = (
    ("077", 1_000_000_000, {"LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "1"}),
    ("002", 1_700_000_000, {"LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2"}),
)


def built(folder: Path, umask: str, time: int, environment: dict[str, str]) -> bytes:
    """The archive that a checkout in this folder builds, by an interpreter of its own."""
    checkout = folder / "checkout"
    for name in COPIED:
        source = archive.ROOT / name
        if source.is_dir():
            shutil.copytree(source, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, checkout / name)
    for path in checkout.rglob("*"):
        os.utime(path, (time, time))
        path.chmod(0o700 if path.is_dir() else 0o600 if umask == "077" else 0o664)
    venv.create(folder / "venv", symlinks=True)
    (inside,) = (folder / "venv").glob("lib/python*/site-packages")
    (inside / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    words = [str(folder / "venv" / "bin" / "python"), "-c", BUILD, umask]
    here = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(checkout), **environment}
    done = subprocess.run(words, cwd=checkout, env=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = Path(done.stdout.strip())
    assert list(made.parent.iterdir()) == [made]
    return made.read_bytes()


def test_the_same_commit_gives_the_same_bytes(tmp_path: Path) -> None:
    one, other = (built(tmp_path / str(number), *way) for number, way in enumerate(WAYS))
    assert sha256(one).hexdigest() == sha256(other).hexdigest()


def test_the_archive_says_nothing_of_the_host_that_built_it(cache: Path) -> None:
    with tarfile.open(archive.build("x86_64")) as tar:
        for entry in tar:
            assert (entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) == (0, 0, "", "", 0)
            assert entry.mode in (0o644, 0o755)
            content = file.read() if (file := tar.extractfile(entry)) is not None else b""
            assert sys.prefix.encode() not in content, entry.name
