"""Builds modules with the names of NVIDIA's, for nodes without a GPU, on this host for the node's kernel."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from lab import image, repository
from lab.command import run
from lab.packages import toolchain

HERE = Path(__file__).parent
NAMES = ("nvidia", "nvidia_peermem")


def modules(disk: image.Image) -> list[Path]:
    """The modules' .ko files for the kernel of an image."""
    sources = sorted(str(path) for path in HERE.iterdir() if path.is_file())
    inputs = [str(disk.folder).encode(), *repository.source_of(*sources)]
    folder = repository.cached("gpu-modules", inputs, lambda made: _build(disk, made))
    return [folder / f"{name}.ko" for name in NAMES]


def _build(disk: image.Image, made: Path) -> None:
    release = toolchain.kernel_of(disk).release
    with TemporaryDirectory(prefix="trackbed-gpu-") as folder:
        work = Path(folder)
        for package in toolchain.debs(disk):
            if package.name.startswith("linux-"):
                run(["dpkg-deb", "-x", package, work])
        # The packaged Makefile includes its other half by absolute path.
        makefile = work / f"usr/src/linux-headers-{release}/Makefile"
        makefile.write_text(makefile.read_text().replace("/usr/src/", f"{work}/usr/src/"))
        source = work / "source"
        shutil.copytree(HERE, source)
        run(["make", "-C", makefile.parent, f"M={source}", "modules"])
        for name in NAMES:
            shutil.copy(source / f"{name}.ko", made)
