"""Installs what this host needs to build and run the nodes."""

import os
import re
import shutil
import subprocess

from lab import apt
from lab.command import run
from lab.debian import HOST
from lab.errors import LabError
from lab.progress import step

# QEMU 7.2 of Debian 12 has no igb card.
QEMU_MAJOR = 8

AS_ROOT = "Run all commands of the lab as root, as `sudo make lab`: its image and its nodes are then root's."
"""The remedy of what only root can do. The image is in root's cache, where a user's commands do not look."""

FROM_BACKPORTS = ("qemu-system-x86", "qemu-utils")
PACKAGES = (
    "e2fsprogs",
    "gcc-12",
    "gpg",
    "gpg-agent",
    "kmod",
    "make",
    "mmdebstrap",
    "openssh-client",
    "xz-utils",
    "zstd",
)


def ensure_packages(more: tuple[str, ...] = (), newer: tuple[str, ...] = ()) -> None:
    """Install the missing packages of PACKAGES and ``more``, and those of ``newer``, which only backports have.

    If none is missing, nothing is downloaded, and root is not needed.
    """
    if shutil.which("dpkg-query") is None:
        raise LabError("this host has no dpkg", f"The lab runs on a Debian {HOST.version} host.")
    missing = [package for package in (*PACKAGES, *more) if not _installed(package)]
    late = [*(() if _qemu_major() >= QEMU_MAJOR else FROM_BACKPORTS), *(p for p in newer if not _installed(p))]
    if not missing and not late:
        return
    if os.geteuid() != 0:
        raise LabError(
            f"this host lacks {', '.join([*missing, *late])}",
            f"Install them (QEMU and Go from {HOST.suite}-backports), or: {AS_ROOT}",
        )
    sources = apt.host_sources()
    what = "host: installing " + ", ".join([*missing, *late])
    with step(what, usual_s=20), apt.throwaway((*sources, apt.backports(sources))) as ours:
        install = ("install", "-y", "-q", "--no-install-recommends")
        if missing:
            ours.get(*install, *missing)
        if late:
            # -t, because QEMU needs the firmware and data of its own release.
            ours.get(*install, "-t", f"{HOST.suite}-backports", *late)


def _installed(package: str) -> bool:
    query = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package], capture_output=True, text=True, check=False
    )
    return query.stdout == "installed"


def _qemu_major() -> int:
    try:
        version = run(["qemu-system-x86_64", "--version"])
        run(["qemu-img", "--version"])
    except LabError:
        return 0
    match = re.search(r"version (\d+)\.", version)
    return int(match[1]) if match else 0
