"""Control hosts as new users have them: a bare Debian or Ubuntu in its own folder, with git, make and Python. Needs root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import attrs

from lab import apt, cache
from lab.command import run
from lab.debian import DEBIANS
from lab.lock import exclusive

UBUNTU = "TRACKBED_UBUNTU"
"""The variable that says how Ubuntu's archive is reached: the options and the address of a line of sources.list, such as
`[signed-by=/srv/ubuntu-archive-keyring.gpg] http://mirror.example.net/ubuntu`."""

PACKAGES = ("apt", "ca-certificates", "git", "make", "openssh-client", "python3", "python3-venv")
# How this machine's pip reaches its package index; a folder of wheels among them is made visible, too.
PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_DEFAULT_TIMEOUT")
CONFIGURATION = (Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf")

ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
"""In namespaces of its own, so that its processes and mounts end with it."""

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@attrs.frozen
class ControlHost:
    """``root``: its file system, which is this machine's only as far as it is bound in. The network is this machine's."""

    root: Path

    def run(self, *words: str, cwd: str = "/srv", timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Run a program. Its processes end with it."""
        given = {
            name: os.environ[name] for name in (*PIP, "https_proxy", "http_proxy", "no_proxy") if name in os.environ
        }
        return subprocess.run(
            [
                *(*ALONE, f"--root={self.root}", f"--wd={cwd}"),
                *("sh", "-c", 'mount -t proc proc /proc && mount -t devtmpfs dev /dev && exec "$@"', "sh", *words),
            ],
            env={"HOME": "/srv", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **given},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def write(self, path: str, text: str) -> None:
        """Write a file."""
        (self.root / path.lstrip("/")).write_text(text)


def sources_of(suite: str) -> tuple[str, ...]:
    """The lines of sources.list for a suite of Debian or Ubuntu; none: this machine reaches no archive that has it."""
    for debian in DEBIANS:
        if debian.suite == suite and not debian.backports:
            return tuple(source.line() for source in apt.sources_of(debian))
    archive = os.environ.get(UBUNTU)
    # Ubuntu has python3-venv in universe.
    return tuple(f"deb {archive} {each} main universe" for each in (suite, f"{suite}-updates")) if archive else ()


@contextmanager
def fresh(suite: str, folder: Path) -> Iterator[ControlHost]:
    """A control host on which nothing was done yet. It ends with the block.

    :param folder: an empty one, for what it writes.
    """
    lower = _installed(suite)
    upper, work, root = (folder / name for name in ("upper", "work", "root"))
    for each in (upper, work, root):
        each.mkdir()
    run(["mount", "-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", root])
    try:
        _reach_packages(root)
        yield ControlHost(root)
    finally:
        run(["umount", "--recursive", root])


def _installed(suite: str) -> Path:
    """Its packages, from this machine's mirror; kept in the cache."""
    sources = "".join(f"{line}\n" for line in sources_of(suite))
    key = sha256("\n".join([*PACKAGES, sources, *apt.carried_options()]).encode()).hexdigest()[:16]
    made = cache.home() / f"control-{suite}-{key}"
    cache.home().mkdir(parents=True, exist_ok=True)
    with exclusive(cache.home() / "lock", "a build of the cache is under way"):
        if not made.exists():
            building = made.with_name(f"{made.name}.building")
            run(["rm", "-rf", "--one-file-system", building])
            listed = made.with_name(f"{made.name}.list")
            listed.write_text(sources)
            options = [f"--aptopt={option}" for option in apt.carried_options()]
            words = ["mmdebstrap", "--mode=root", "--variant=minbase", f"--include={','.join(PACKAGES)}", *options]
            run([*ALONE, "--mount-proc", *words, suite, building, listed])
            building.rename(made)
    return made


def _reach_packages(root: Path) -> None:
    for file in CONFIGURATION:
        if file.exists():
            shutil.copy(file, root / "etc/pip.conf")
    for name in ("resolv.conf", "hosts"):
        shutil.copy(Path("/etc") / name, root / "etc" / name)
    shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    for links in os.environ.get("PIP_FIND_LINKS", "").split():
        if Path(links).is_dir():
            target = root / links.lstrip("/")
            target.mkdir(parents=True)
            run(["mount", "--bind", "-o", "ro", links, target])
