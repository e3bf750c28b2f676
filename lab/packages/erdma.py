"""A stand-in for Alibaba's DKMS package: the kernel's own erdma, with the vendor's parameter `compat_mode` added."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from lab import apt, image, repository
from lab.command import run
from lab.errors import LabError
from lab.modules import source_package
from lab.packages import toolchain
from lab.progress import step

VERSIONS = ("1.0", "1.1")
DRIVER = "drivers/infiniband/hw/erdma"
MAIN = "erdma_main.c"
ANCHOR = 'MODULE_LICENSE("Dual BSD/GPL");\n'
# The kernel's driver speaks iWARP only. This parameter is read back, and has no other effect.
PARAMETER = """
static bool compat_mode;
module_param(compat_mode, bool, 0444);
MODULE_PARM_DESC(compat_mode, "RoCE-compatible mode (in Trackbed's lab: a value and no more)");
"""
CONF = """\
BUILT_MODULE_NAME="erdma"
DEST_MODULE_LOCATION="/extra"
MAKE="make -C ${kernel_source_dir} M=${dkms_tree}/erdma/${PACKAGE_VERSION}/build CONFIG_INFINIBAND_ERDMA=m modules"
CLEAN="make -C ${kernel_source_dir} M=${dkms_tree}/erdma/${PACKAGE_VERSION}/build clean"
"""
ARCHIVE = "erdma_installer-1.0.tar.gz"
INSTALL = """\
#!/bin/sh
set -e
[ "$1" = --batch ] || { echo "this one asks no questions: give --batch" >&2; exit 2; }
[ "$ERDMA_CM_NO_BOUND_IF" = 1 ] || { echo "ERDMA_CM_NO_BOUND_IF is not 1" >&2; exit 2; }
command -v dkms >/dev/null || { echo "the packages that the vendor's document names are missing" >&2; exit 2; }
if [ -n "$(dkms status -m erdma)" ]; then dkms remove -m erdma -v VERSION --all; fi
rm -rf /usr/src/erdma-VERSION
cp -r driver /usr/src/erdma-VERSION
dkms install -m erdma -v VERSION
"""


def vendor(disk: image.Image) -> repository.Repository:
    """A repository with both versions of `erdma-dkms`, made from the source of this image's kernel."""
    inputs = [str(disk.folder).encode(), *repository.source_of(__file__, toolchain.__file__)]
    return repository.ensure("erdma", inputs, lambda pool: _build(disk, pool))


def installer(disk: image.Image) -> Path:
    """A stand-in for the vendor's archive: its `install.sh --batch` adds the driver's source to DKMS, and builds it."""
    inputs = [str(disk.folder).encode(), *repository.source_of(__file__, toolchain.__file__)]
    folder = repository.cached("erdma-installer", inputs, lambda made: _archive(vendor(disk), made))
    return folder / ARCHIVE


def _archive(packages: repository.Repository, made: Path) -> None:
    version = VERSIONS[0]
    with TemporaryDirectory(prefix="trackbed-erdma-") as folder:
        tree = Path(folder) / "erdma_installer"
        run(["dpkg-deb", "-x", packages.deb("erdma-dkms", version), tree])
        (tree / f"usr/src/erdma-{version}").rename(tree / "driver")
        shutil.rmtree(tree / "usr")
        (tree / "install.sh").write_text(INSTALL.replace("VERSION", version))
        (tree / "install.sh").chmod(0o755)
        run(["tar", "-C", folder, "-czf", made / ARCHIVE, tree.name])


def _build(disk: image.Image, pool: Path) -> None:
    with TemporaryDirectory(prefix="trackbed-erdma-") as folder:
        source = kernel_source(disk, (DRIVER,), Path(folder)) / DRIVER
        main = source / MAIN
        text = main.read_text()
        if text.count(ANCHOR) != 1 or "compat_mode" in text:
            raise LabError(f"{MAIN} of this kernel is not as expected", f"Adapt {__file__} to it.")
        for version in VERSIONS:
            # Each has its own version, hence its own srcversion.
            main.write_text(text.replace(ANCHOR, f'{ANCHOR}MODULE_VERSION("{version}");\n{PARAMETER}'))
            repository.dkms_deb(pool, "erdma", version, source, CONF)


def kernel_source(disk: image.Image, folders: tuple[str, ...], work: Path) -> Path:
    """Unpack some folders of the source of an image's kernel, from linux-source. Returns the tree's root."""
    kernel = toolchain.kernel_of(disk)
    name = source_package(kernel.release)
    with step(f"{name} {kernel.version}", usual_s=30), apt.of_nodes(disk.debian) as ours:
        run(["env", "-C", work, "apt-get", *ours.options(), "-q", "download", f"{name}={kernel.version}"])
    run(["dpkg-deb", "-x", next(work.glob("*.deb")), work])
    run(["tar", "-C", work, "-xJf", work / f"usr/src/{name}.tar.xz", *(f"{name}/{folder}" for folder in folders)])
    shutil.rmtree(work / "usr")
    return work / name
