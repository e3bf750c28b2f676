"""Stand-ins for DOCA-OFED and MLNX_OFED: the vendor's names and shapes of packages, with the kernel's own rxe as the driver.

That rxe has the VF as its parent, like a ConnectX VF's RDMA device (lab/modules.py). It is compiled as one file: its
twenty files would take minutes under emulation.
"""

import shutil
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from lab import apt, image, repository, rpm
from lab.command import run
from lab.modules import rxe_as_a_card
from lab.packages import toolchain
from lab.packages.erdma import kernel_source

HERE = Path(__file__).parent
DRIVER = "drivers/infiniband/sw/rxe"
LICENSE = 'MODULE_LICENSE("Dual BSD/GPL");\n'
# Two functions of this file have the same names as functions of another file.
RENAMED = "#define check_psn responder_check_psn\n#define do_complete responder_do_complete\n"
CONF = """\
BUILT_MODULE_NAME="rdma_rxe"
DEST_MODULE_LOCATION="/updates"
MAKE="make -C ${kernel_source_dir} M=${dkms_tree}/${PACKAGE_NAME}/${PACKAGE_VERSION}/build modules"
CLEAN="make -C ${kernel_source_dir} M=${dkms_tree}/${PACKAGE_NAME}/${PACKAGE_VERSION}/build clean"
"""
# The profile's versions, and those of its kernel package. The last one does not compile.
DOCA = {"3.2.0-1": "25.10.OFED.25.10.1.2.2", "3.2.1-1": "25.10.OFED.25.10.1.7.1", "3.2.2-1": "25.10.OFED.25.10.9.9.9"}
BROKEN = "3.2.2-1"
RDMA_CORE = "2510mlnx58-1.2510067"
MLNX_OFED = ("24.10-1.1.4.0", "24.10-2.1.8.0")


DEBIAN, RHEL = "mlnx-ofed-kernel", "mlnx-ofa_kernel"
"""The module's name in DKMS."""

_SYSTEM = {DEBIAN: "debian12.5", RHEL: "rhel9.4"}


def vendor(disk: image.Image, version: str, name: str = DEBIAN) -> repository.Repository:
    """The repository of one version of the profile, shaped like NVIDIA's, with the packages that building the drivers needs."""
    inputs = [*_inputs(disk), name.encode()]
    return repository.ensure(f"doca-{version}", inputs, lambda pool: _doca(disk, version, name, pool))


def bundle(disk: image.Image, version: str, name: str = DEBIAN) -> Path:
    """MLNX_OFED of one of those versions, as a .tgz like the vendor's.

    :param name: :data:`RHEL` for the RHEL family's bundle.
    """
    inputs = [*_inputs(disk), name.encode(), *repository.source_of(rpm.__file__)]
    folder = repository.cached(f"mlnx-ofed-{_SYSTEM[name]}", inputs, lambda made: _bundles(disk, name, made))
    return folder / f"{_bundle(version, name)}.tgz"


def _bundle(version: str, name: str) -> str:
    return f"MLNX_OFED_LINUX-{version}-{_SYSTEM[name]}-x86_64"


def _inputs(disk: image.Image) -> list[bytes]:
    files = (__file__, toolchain.__file__, str(HERE / "openibd"), str(HERE / "mlnxofedinstall"))
    return [str(disk.folder).encode(), *repository.source_of(*files)]


def _doca(disk: image.Image, version: str, name: str, pool: Path) -> None:
    toolchain.link(disk, pool)
    kernel = DOCA[version]
    with TemporaryDirectory(prefix="trackbed-doca-") as folder:
        _kernel_part(pool, _driver(disk, Path(folder)), kernel, name, broken=version == BROKEN)
        _tools(pool, kernel, f"OFED-internal-{kernel.partition('.OFED.')[2]}")
        _rdma_core(disk, pool, Path(folder))
    parts = ("mlnx-ofed-kernel-dkms", "mlnx-ofed-kernel-utils", "ofed-scripts")
    # As the vendor's packages: they go back only if they are told to.
    depends = [*(f"{part} (>= {kernel})" for part in parts), f"rdma-core (>= {RDMA_CORE})"]
    repository.deb(pool, {"Package": "doca-ofed", "Version": version, "Depends": ", ".join(depends)})


def _bundles(disk: image.Image, name: str, made: Path) -> None:
    with TemporaryDirectory(prefix="trackbed-mlnx-ofed-") as folder:
        source = _driver(disk, Path(folder))
        for version in MLNX_OFED:
            kernel = f"24.10.OFED.{version.replace('-', '.')}"
            root = Path(folder) / _bundle(version, name)
            debs = root / "DEBS"
            debs.mkdir(parents=True)
            _kernel_part(debs, source, kernel, name)
            _tools(debs, kernel, f"MLNX_OFED_LINUX-{version}")
            if name == RHEL:
                (root / "RPMS").mkdir()
                rpm.from_debs(root / "RPMS", sorted(debs.iterdir()), {"dkms": "dkms"}, scripts=True)
                shutil.rmtree(debs)
            (root / "distro").write_text(f"{_SYSTEM[name].partition('.')[0]}\n")
            shutil.copy(HERE / "mlnxofedinstall", root)
            with tarfile.open(made / f"{root.name}.tgz", "w:gz", compresslevel=1) as tar:
                tar.add(root, root.name)


def _driver(disk: image.Image, work: Path) -> Path:
    """Write the source of rxe as one file."""
    tree = kernel_source(disk, (DRIVER,), work)
    for patch in rxe_as_a_card(tree):
        patch.apply(tree)
    source = tree / DRIVER
    parts = sorted(path.name for path in source.glob("rxe*.c"))
    lines = [f'{RENAMED if name == "rxe_resp.c" else ""}#include "{name}"\n' for name in parts]
    (source / "all.c").write_text("".join(lines))
    (source / "Makefile").write_text("obj-m := rdma_rxe.o\nrdma_rxe-y := all.o\n")
    return source


def _kernel_part(pool: Path, source: Path, version: str, name: str = DEBIAN, broken: bool = False) -> None:
    """``mlnx-ofed-kernel-dkms``. The module has a version, so that it has a srcversion of its own.

    ``name``: the module's name in DKMS.
    """
    with TemporaryDirectory(prefix="trackbed-ofed-") as folder:
        tree = Path(folder) / "source"
        shutil.copytree(source, tree)
        main = tree / "rxe.c"
        extra = f'MODULE_VERSION("{version}");\n' + ("#error the vendor has made a mistake\n" if broken else "")
        main.write_text(main.read_text().replace(LICENSE, LICENSE + extra))
        repository.dkms_deb(pool, name, version, tree, CONF, {"Package": "mlnx-ofed-kernel-dkms"})


def _tools(pool: Path, version: str, name: str) -> None:
    """``mlnx-ofed-kernel-utils`` with openibd, and ``ofed-scripts`` with ofed_info."""
    with TemporaryDirectory(prefix="trackbed-ofed-") as folder:
        utils, scripts = Path(folder) / "utils", Path(folder) / "scripts"
        (utils / "etc/init.d").mkdir(parents=True)
        shutil.copy(HERE / "openibd", utils / "etc/init.d")
        (scripts / "usr/bin").mkdir(parents=True)
        info = scripts / "usr/bin/ofed_info"
        info.write_text(f"#!/bin/sh\necho '{name}:'\n")
        info.chmod(0o755)
        repository.deb(pool, {"Package": "mlnx-ofed-kernel-utils", "Version": version}, utils)
        repository.deb(pool, {"Package": "ofed-scripts", "Version": version}, scripts)


def _rdma_core(disk: image.Image, pool: Path, work: Path) -> None:
    """Debian's rdma-core, with a version like the vendor's."""
    with apt.of_nodes(disk.debian) as ours:
        run(["env", "-C", work, "apt-get", *ours.options(), "-q", "download", "rdma-core"])
    tree = work / "rdma-core"
    run(["dpkg-deb", "-R", next(work.glob("rdma-core_*.deb")), tree])
    control = tree / "DEBIAN/control"
    lines = control.read_text().splitlines(keepends=True)
    control.write_text("".join(f"Version: {RDMA_CORE}\n" if line.startswith("Version:") else line for line in lines))
    run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, pool / f"rdma-core_{RDMA_CORE}_amd64.deb"])
