"""Packages NVIDIA's container toolkit as NVIDIA does, built from its Go module, together with Debian's container engines.

libnvidia-container is left out: it is C code outside of the module, and the runtime does not need it for CDI devices. Empty
packages have its names.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from lab import image, repository
from lab.go import go_programs
from lab.packages import toolchain
from lab.progress import step

MODULE = "github.com/NVIDIA/nvidia-container-toolkit"
RELEASE = "1.20.1"
VERSION = f"{RELEASE}-1"
TOOLKIT = go_programs.Build(
    name=f"nvidia-container-toolkit-{RELEASE}",
    packages=tuple(
        f"{MODULE}/cmd/{name}@v{RELEASE}"
        for name in ("nvidia-ctk", "nvidia-cdi-hook", "nvidia-container-runtime", "nvidia-container-runtime-hook")
    ),
    ldflags=f"-X {MODULE}/internal/info.version={RELEASE}",
    # It loads NVML, if there is one, by the C library's dlopen.
    cgo=True,
    usual_s=40,
)
_ENGINES = ("docker.io", "containerd", "runc", "iptables", "tini", "busybox-static", "gpg", "apparmor")

# A short form of the postinst of NVIDIA's package.
_POSTINST = """\
#!/bin/sh
set -e
nvidia-ctk --quiet config --config-file=/etc/nvidia-container-runtime/config.toml --in-place
"""


def engines(disk: image.Image) -> tuple[str, ...]:
    """Debian's packages of the engines. As of Debian 13 docker's command line is a package of its own."""
    return _ENGINES if disk.debian.suite == "bookworm" else (*_ENGINES, "docker-cli")


def vendor(disk: image.Image) -> repository.Repository:
    """A repository with the toolkit, and with the engines that a node of this image lacks."""
    inputs = [TOOLKIT.target.name.encode(), str(disk.folder).encode()]
    inputs += repository.source_of(__file__, toolchain.__file__)
    return repository.ensure("nvidia", inputs, lambda pool: _build(disk, pool))


def _build(disk: image.Image, pool: Path) -> None:
    programs = go_programs.ensure(TOOLKIT)
    source = go_programs.source(f"{MODULE}@v{RELEASE}")
    base = "nvidia-container-toolkit-base"
    with TemporaryDirectory(prefix="trackbed-nvidia-") as folder:
        root = Path(folder) / base
        for name in ("nvidia-ctk", "nvidia-cdi-hook", "nvidia-container-runtime"):
            _copy(programs / name, root / "usr/bin", 0o755)
        for name in ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service"):
            _copy(source / "deployments/systemd" / name, root / "lib/systemd/system", 0o644)
        _copy(source / "deployments/systemd/nvidia-cdi-refresh.env", root / "etc/nvidia-container-toolkit", 0o644)
        repository.deb(
            pool, {"Package": base, "Version": VERSION, "Architecture": "amd64"}, root, {"postinst": _POSTINST}
        )
        root = Path(folder) / "nvidia-container-toolkit"
        _copy(programs / "nvidia-container-runtime-hook", root / "usr/bin", 0o755)
        needs = f"{base} (= {VERSION}), libnvidia-container-tools (= {VERSION})"
        toolkit = {"Package": "nvidia-container-toolkit", "Version": VERSION, "Architecture": "amd64", "Depends": needs}
        repository.deb(pool, toolkit, root)
    tools = {"Package": "libnvidia-container-tools", "Version": VERSION}
    repository.deb(pool, {**tools, "Depends": f"libnvidia-container1 (= {VERSION})"})
    repository.deb(pool, {"Package": "libnvidia-container1", "Version": VERSION})
    with step("Debian's container engines", usual_s=30):
        toolchain.fetch(disk, pool, *engines(disk))


def _copy(file: Path, folder: Path, mode: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Path(shutil.copy(file, folder)).chmod(mode)
