"""Fetches the deploy as a signed archive, verifies and unpacks it, and runs it on this node; trackbed-pull.timer starts it."""

import fcntl
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from pathlib import Path

SETTINGS = Path(os.environ.get("TRACKBED_PULL_SETTINGS", "/etc/trackbed/pull.json"))
KEYRING = Path(os.environ.get("TRACKBED_PULL_KEYRING", "/etc/trackbed/pull.gpg"))
STATE = Path(os.environ.get("TRACKBED_PULL_STATE", "/var/lib/trackbed/pull"))
LIMIT = 1 << 30
ARCHIVE, SIGNATURE = "archive.tar.gz", "archive.tar.gz.sig"


def main() -> None:
    """Fetch and run the archive once, or say in one line why not."""
    try:
        run()
    except OSError as error:
        sys.exit(f"nothing is deployed: {error}; make room and make the folder writable: df {STATE}; df -i {STATE}")


def run() -> None:
    """Fetch, verify and unpack the archive, and run it."""
    url = settings(SETTINGS)
    STATE.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = (STATE / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # SIGTERM (systemctl stop) removes the folder below as an error does; after SIGKILL the next run does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for left in STATE.glob("new-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=STATE, prefix="new-") as folder:
        work = Path(folder)
        archive, signature = work / ARCHIVE, work / SIGNATURE
        fetch(url + ".sig", signature)
        if not kept(signature):
            fetch(url, archive)
            if error := fault(archive, signature):
                sys.exit(f"{url} is not deployed, since no key in {KEYRING} has signed it:\n{error}")
            # A power cut between the two leaves a pair that does not match, and kept() verifies it.
            archive.replace(STATE / ARCHIVE)
            signature.replace(STATE / SIGNATURE)
        archive = STATE / ARCHIVE
        tree = work / "tree"
        unpack(archive, tree, url)
        made = issued(tree / "ISSUED", f"{url}: build the archive again: python -m tasks.pull")
        newest = STATE / "issued"
        if newest.exists() and made < issued(newest, f"remove {newest}, and the node takes an archive of any age once"):
            sys.exit(f"{url}: the archive is older than the last one deployed; build a new one, or remove {newest}")
        remember(newest, made)
        sys.exit(deploy(tree))


def remember(newest: Path, made: int) -> None:
    """Note the archive, so that no older one is deployed; a power cut leaves the old note or the new one."""
    beside = newest.with_name("issued.new")
    with beside.open("w") as file:
        file.write(f"{made}\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(newest)


def settings(file: Path) -> str:
    """The archive's URL, from the settings that the deploy has written."""
    try:
        return str(json.loads(file.read_text())["url"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        sys.exit(f"{file} cannot be read: {error!r}; run the deploy from the control host again")


def issued(file: Path, remedy: str) -> int:
    """When an archive was made, in seconds since the epoch."""
    try:
        return int(file.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"the file {file.name} does not contain a time ({error}); {remedy}")


def fetch(url: str, file: Path) -> None:
    """Download a file of at most LIMIT bytes."""
    try:
        # The deploy has checked the URL's scheme.
        with urllib.request.urlopen(url, timeout=60) as source, file.open("wb") as target:  # noqa: S310
            while block := source.read(1 << 16):
                if target.tell() + len(block) > LIMIT:
                    sys.exit(f"{url} has more than {LIMIT} bytes; check that it is the archive")
                target.write(block)
            size = source.headers.get("Content-Length", "")
            if size.isdigit() and target.tell() != int(size):
                sys.exit(f"{url} ended after {target.tell()} of {size} bytes; the next run fetches it again")
    except (OSError, ValueError, http.client.HTTPException) as error:
        sys.exit(f"{url} cannot be fetched: {error}")


def kept(signature: Path) -> bool:
    """Whether the archive of the last run has this signature, so that it need not be fetched again."""
    there = STATE / SIGNATURE
    same = there.exists() and there.read_bytes() == signature.read_bytes()
    # The disk may have changed the archive since, and the keyring may have lost the key.
    return same and not fault(STATE / ARCHIVE, signature)


def fault(archive: Path, signature: Path) -> str:
    """Verify the signature with gpgv and the node's keyring; its error, empty if the signature is good."""
    gpgv = shutil.which("gpgv") or shutil.which("gpgv2")
    if gpgv is None:
        sys.exit("the node has no gpgv to verify the archive; install the package gpgv (Debian, Ubuntu) or gnupg2")
    done = subprocess.run([gpgv, "--keyring", KEYRING, signature, archive], capture_output=True, text=True, check=False)
    return (done.stderr.strip() or f"gpgv ends with {done.returncode}") if done.returncode else ""


def unpack(archive: Path, tree: Path, url: str) -> None:
    """Unpack into ``tree``. The filter refuses paths outside it, and devices."""
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(tree, filter="data")
            else:  # early releases of 3.10 and 3.11 have no filter; the content is signed
                tar.extractall(tree)  # noqa: S202
    except (tarfile.TarError, EOFError, ValueError, LookupError, OSError, zlib.error) as error:
        sys.exit(
            f"{url} is signed, but cannot be unpacked: {error!r}; build and sign it again, or make room: df {STATE}"
        )


def deploy(tree: Path) -> int:
    """Run the archive's pyinfra on this node."""
    libraries = tree / f"lib-{sys.version_info.major}.{sys.version_info.minor}-{os.uname().machine}"
    if not libraries.is_dir():
        has = ", ".join(sorted(path.name.removeprefix("lib-") for path in tree.glob("lib-*")))
        sys.exit(
            f"the archive has no libraries for {libraries.name.removeprefix('lib-')}, only for {has}; build it with that --for"
        )
    environment = {
        **os.environ,
        "PYTHONPATH": str(libraries),
        "XDG_CACHE_HOME": str(tree / "cache"),
        "PYINFRA_PROGRESS": "off",
    }
    environment.setdefault("HOME", "/root")
    environment.setdefault("LC_ALL", "C.UTF-8")
    command = [sys.executable, "-m", "pyinfra", "-y", "inventories/local.py", "deploy.py"]
    return subprocess.run(command, cwd=tree, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
