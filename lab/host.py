"""What this host must have to build and run the nodes."""

import os
import re
import subprocess

from lab import apt
from lab.command import run
from lab.errors import LabError
from lab.progress import step

# QEMU 7.2 of Debian 12 has no igb card.
QEMU_MAJOR = 8
FROM_BACKPORTS = ("qemu-system-x86", "qemu-utils")
PACKAGES = ("e2fsprogs", "gcc-12", "kmod", "make", "mmdebstrap", "openssh-client", "xz-utils")


def ensure_packages() -> None:
    """Install what is missing; nothing is downloaded, nor root needed, when all is there."""
    missing = [package for package in PACKAGES if not _installed(package)]
    qemu = () if _qemu_major() >= QEMU_MAJOR else FROM_BACKPORTS
    if not missing and not qemu:
        return
    if os.geteuid() != 0:
        raise LabError(
            f"this host lacks {', '.join([*missing, *qemu])}",
            f"Run as root, or install them (QEMU from {apt.SUITE}-backports).",
        )
    sources = apt.host_sources()
    what = "host: installing " + ", ".join([*missing, *qemu])
    with step(what, usual_s=20), apt.throwaway((*sources, apt.backports(sources))) as ours:
        install = ("install", "-y", "-q", "--no-install-recommends")
        if missing:
            ours.get(*install, *missing)
        if qemu:
            # -t, as QEMU wants the firmware and data of its own release.
            ours.get(*install, "-t", f"{apt.SUITE}-backports", *qemu)


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
    found = re.search(r"version (\d+)\.", version)
    return int(found[1]) if found else 0
