"""Debian's packages that a node needs to build kernel modules: DKMS, a compiler, and the headers of the image's kernel."""

import re
import shutil
from pathlib import Path

import attrs

from lab import apt, image, repository
from lab.command import run
from lab.errors import LabError
from lab.progress import step

# gpg: the deploy gets the fingerprint of a vendor's key from it, and Debian's minimal systems do not have it.
PACKAGES = ("dkms", "gpg", "make")


@attrs.frozen
class Kernel:
    """A kernel of Debian: its release as `uname -r` prints it, and the version of its packages."""

    release: str
    version: str


def kernel_of(disk: image.Image) -> Kernel:
    """The kernel in an image."""
    match = re.search(r"^Package: linux-image-(\d\S+)\n(?:.+\n)*?Version: (\S+)", _status(disk), re.MULTILINE)
    if match is None:
        raise LabError(
            f"the image {disk.folder} has no kernel", "Delete that folder: `python -m lab up` builds it again."
        )
    return Kernel(match[1], match[2])


def debs(disk: image.Image) -> list[Path]:
    """The packages that a node of this image lacks, from the build host's mirrors, cached and repacked."""
    folder = repository.cached(
        "toolchain",
        [str(disk.folder).encode(), *repository.source_of(__file__)],
        lambda made: _fetch(disk, made),
    )
    return sorted(folder.glob("*.deb"))


def link(disk: image.Image, pool: Path) -> None:
    """Link the packages into a repository that is being built."""
    for package in debs(disk):
        (pool / package.name).hardlink_to(package)


def mirror(disk: image.Image, *more: str) -> repository.Repository:
    """A small mirror for a node of this image. It has these packages and `more` of Debian's, and no others."""

    def build(pool: Path) -> None:
        link(disk, pool)
        if more:
            fetch(disk, pool, *more)

    inputs = [str(disk.folder).encode(), *repository.source_of(__file__), *(package.encode() for package in more)]
    return repository.ensure("mirror", inputs, build)


def _fetch(disk: image.Image, made: Path) -> None:
    kernel = kernel_of(disk)
    headers = f"linux-headers-{kernel.release}={kernel.version}"
    try:
        with step(f"packages to build modules for {kernel.release}", usual_s=30):
            fetch(disk, made, *PACKAGES, disk.debian.compiler, headers)
    except LabError as error:
        remedy = f"If the mirror has no {headers} any more, remove {disk.folder}: the image is then built anew."
        raise LabError(error.what, remedy) from None


def fetch(disk: image.Image, made: Path, *packages: str) -> None:
    """Put Debian packages into a folder, repacked, with their dependencies that a node of this image lacks."""
    with apt.of_nodes(disk.debian) as ours:
        # Use the image's package status, so that packages of the image are not fetched again.
        status = ours.folder / "status"
        status.write_text(_status(disk))
        for package in ours.fetch(status, *packages):
            plain = repository.repack(made, package)
            # apt writes an epoch's colon as %3a, which an HTTP server would decode.
            shutil.move(plain, made / plain.name.replace("%3a", "."))


def _status(disk: image.Image) -> str:
    return run(["debugfs", "-R", "cat /var/lib/dpkg/status", disk.disk])
