"""A stand-in for Docker's containerd.io: Debian's containerd and runc in one package, with Docker's configuration."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from lab import image, repository
from lab.command import run
from lab.packages import toolchain

VERSION = "1.6.20-1"
CONFIG = """\
#   Copyright 2018-2022 Docker Inc.

disabled_plugins = ["cri"]

#root = "/var/lib/containerd"
"""
POSTINST = "#!/bin/sh\nset -e\nsystemctl daemon-reload\nsystemctl enable --now containerd.service\n"


def vendor(disk: image.Image) -> repository.Repository:
    """A repository with containerd.io, and with what it needs that a node of this image lacks."""
    inputs = [str(disk.folder).encode(), *repository.source_of(__file__, toolchain.__file__)]

    def build(pool: Path) -> None:
        with TemporaryDirectory(prefix="trackbed-docker-") as folder:
            fetched = Path(folder)
            toolchain.fetch(disk, fetched, "containerd", "runc")
            ours = [next(fetched.glob(f"{name}_*.deb")) for name in ("containerd", "runc")]
            for package in fetched.glob("*.deb"):
                if package not in ours:
                    shutil.copy(package, pool)
            containerd_io(pool, *ours)

    return repository.ensure("docker", inputs, build)


def containerd_io(pool: Path, *parts: Path) -> None:
    """Make the package of Debian's."""
    with TemporaryDirectory(prefix="trackbed-docker-") as folder:
        root = Path(folder) / "root"
        for part in parts:
            run(["dpkg-deb", "-x", part, root])
        (root / "etc/containerd/config.toml").write_text(CONFIG)
        replaced = "containerd, runc"
        fields = {
            "Package": "containerd.io",
            "Version": VERSION,
            "Architecture": "amd64",
            "Depends": "libseccomp2 (>= 2.5.0)",
            "Conflicts": replaced,
            "Replaces": replaced,
            "Provides": replaced,
        }
        repository.deb(pool, fields, root, {"postinst": POSTINST, "conffiles": "/etc/containerd/config.toml\n"})
