"""Builds package repositories like those of vendors, signs each with a key of its own, caches and serves them.

repository = repository.ensure("tools", inputs=[b"1"], build=lambda pool: repository.deb(pool, {...}, tree))
with repository.serve(repository.folder) as url:  # http://10.0.2.2:PORT, as the nodes see this host's loopback
    ...  # deb [signed-by=KEYRING] URL ./
"""

import gzip
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs

from lab import cache, host
from lab.command import run

HOST = "10.0.2.2"
"""The address at which the nodes reach this host's loopback, by QEMU's user networking."""

GPG = ("gpg", "--batch", "--quiet", "--homedir")
"""gpg's command, without the home folder, which follows."""

MAINTAINER = "Trackbed's lab <lab@trackbed.invalid>"

# A short form of the scripts that Debian's dh_dkms adds to packages.
_DKMS_POSTINST = """\
#!/bin/sh
set -e
if [ "$1" = configure ]; then /usr/lib/dkms/common.postinst NAME VERSION "" "" "$2"; fi
"""
_DKMS_PRERM = """\
#!/bin/sh
set -e
case "$1" in
remove|upgrade|deconfigure)
    if [ -n "$(dkms status -m NAME -v VERSION)" ]; then dkms remove -m NAME -v VERSION --all; fi ;;
esac
"""


@attrs.frozen
class Repository:
    """A finished repository, flat like NVIDIA's (suite ``./``). It is never written to again."""

    folder: Path

    @property
    def key(self) -> Path:
        """The public key of its signature, armored. It is served with the packages."""
        return self.folder / "key.asc"

    @property
    def fingerprint(self) -> str:
        """The key's fingerprint, 40 hexadecimal digits."""
        return (self.folder / "fingerprint").read_text().strip()

    def given(self, url: str) -> dict[str, str]:
        """The inventory's value for this repository while it is served at ``url``."""
        return {"uri": url, "key": f"{url}/{self.key.name}", "fingerprint": self.fingerprint}

    def deb(self, package: str, version: str) -> Path:
        """The path of one of its packages."""
        return next(self.folder.glob(f"{package}_{version}_*.deb"))


def deb(
    pool: Path, control: Mapping[str, str], root: Path | None = None, scripts: Mapping[str, str] | None = None
) -> Path:
    """Make a package: fields of its control file (Package and Version at least), its files below ``root``, and scripts
    such as ``postinst``. All files are root's; their modes are kept.
    """
    fields = {"Architecture": "all", "Maintainer": MAINTAINER, "Description": "of Trackbed's lab", **control}
    made = pool / f"{fields['Package']}_{fields['Version']}_{fields['Architecture']}.deb"
    with TemporaryDirectory(prefix="trackbed-deb-") as name:
        tree = Path(name) / "tree"
        if root is not None:
            shutil.copytree(root, tree, symlinks=True)
        meta = tree / "DEBIAN"
        meta.mkdir(parents=True)
        meta.parent.chmod(0o755)
        (meta / "control").write_text("".join(f"{field}: {value}\n" for field, value in fields.items()))
        for script, text in (scripts or {}).items():
            (meta / script).write_text(text)
            (meta / script).chmod(0o755)
        _pack(tree, made)
    return made


def dkms_deb(
    pool: Path, name: str, version: str, source: Path, conf: str, control: Mapping[str, str] | None = None
) -> Path:
    """Make the package ``NAME-dkms``: a module's source in /usr/src/NAME-VERSION, which DKMS builds on the node.

    ``conf`` is dkms.conf but for PACKAGE_NAME, PACKAGE_VERSION and AUTOINSTALL, which are added.
    """
    with TemporaryDirectory(prefix="trackbed-dkms-") as folder:
        tree = Path(folder) / "usr/src" / f"{name}-{version}"
        shutil.copytree(source, tree)
        head = f'PACKAGE_NAME="{name}"\nPACKAGE_VERSION="{version}"\nAUTOINSTALL="yes"\n'
        (tree / "dkms.conf").write_text(head + conf)
        fields = {"Package": f"{name}-dkms", "Version": version, "Depends": "dkms", **(control or {})}
        scripts = {
            script: text.replace("NAME", name).replace("VERSION", version)
            for script, text in (("postinst", _DKMS_POSTINST), ("prerm", _DKMS_PRERM))
        }
        return deb(pool, fields, Path(folder), scripts)


def repack(pool: Path, package: Path) -> Path:
    """Write a package again without compression: an emulated CPU unpacks it in a fraction of the time."""
    made = pool / package.name
    with TemporaryDirectory(prefix="trackbed-deb-") as folder:
        tree = Path(folder) / "tree"
        run(["dpkg-deb", "-R", package, tree])
        _pack(tree, made)
    return made


def ensure(name: str, inputs: Iterable[bytes], build: Callable[[Path], object]) -> Repository:
    """The repository of that name and content. It is built first if it is not cached.

    ``inputs`` are what decides the content, beside this file (``source_of`` gives those of a module); ``build`` puts the
    packages into the folder that it is given.
    """

    def make(folder: Path) -> None:
        build(folder)
        sign(folder)

    return Repository(cached(f"vendor-{name}", inputs, make))


def cached(name: str, inputs: Iterable[bytes], make: Callable[[Path], object]) -> Path:
    """A folder of the cache, made by the host's packages, and again if its inputs change."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for part in inputs:
        digest.update(hashlib.sha256(part).digest())
    folder = cache.home() / f"{name}-{digest.hexdigest()[:16]}"

    def with_packages(work: Path) -> None:
        host.ensure_packages()
        make(work)

    return cache.made(folder, with_packages, name, f"{name}.lock")


def sign(folder: Path) -> None:
    """Write Packages and InRelease for the packages in the folder, over older ones, with a key made for that alone."""
    entries = "".join(_entry(package) for package in sorted(folder.glob("*.deb")))
    (folder / "Packages").write_text(entries)
    (folder / "Packages.gz").write_bytes(gzip.compress(entries.encode(), mtime=0))
    listed = [folder / "Packages", folder / "Packages.gz"]
    lines = ["Origin: Trackbed's lab", "Label: lab", "Suite: ./", "Codename: lab"]
    # apt requires a date; any will do.
    lines += ["Date: Wed, 01 Jan 2025 00:00:00 UTC", "SHA256:"]
    lines += [f" {_sha256(file)} {file.stat().st_size} {file.name}" for file in listed]
    with TemporaryDirectory(prefix="trackbed-release-") as name, signing_key(folder) as home:
        release = Path(name) / "Release"
        release.write_text("\n".join(lines) + "\n")
        run([*GPG, home, "--yes", "--clearsign", "--output", folder / "InRelease", release])


@contextmanager
def signing_key(folder: Path) -> Iterator[str]:
    """Make a key for this repository alone, and write its public part and its fingerprint there; yields gpg's home folder."""
    # Not below the folder, since a socket's path must be short.
    with TemporaryDirectory(prefix="trackbed-gpg-") as home:
        gpg = [*GPG, home]
        try:
            # RSA, as the keys of Docker and NVIDIA are.
            run([*gpg, "--passphrase", "", "--quick-generate-key", MAINTAINER, "rsa3072", "sign", "never"])
            run([*gpg, "--yes", "--armor", "--output", folder / "key.asc", "--export"])
            listing = run([*gpg, "--with-colons", "--list-keys"])
            fingerprint = next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:"))
            (folder / "fingerprint").write_text(f"{fingerprint}\n")
            yield home
        finally:
            run(["gpgconf", "--homedir", home, "--kill", "all"])


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve the files of a folder on a free port of this host's loopback; yields the URL for the nodes.

    Any file will do: an installer's archive, a repository, a folder of several.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def source_of(*modules: str) -> list[bytes]:
    """Inputs for `ensure`: the bytes of these Python files."""
    return [Path(module).read_bytes() for module in modules]


class _Quiet(SimpleHTTPRequestHandler):
    # apt keeps a connection for many files.
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing: the node logs what it fetched."""


def _pack(tree: Path, made: Path) -> None:
    # The same input gives the same bytes.
    run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, made],
        env={**os.environ, "SOURCE_DATE_EPOCH": "1735689600"},
    )


def _entry(package: Path) -> str:
    control = run(["dpkg-deb", "--field", package]).rstrip("\n")
    return f"{control}\nFilename: ./{package.name}\nSize: {package.stat().st_size}\nSHA256: {_sha256(package)}\n\n"


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
