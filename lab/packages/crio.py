"""Makes a package of CRI-O like that of the CRI-O project, from its Go module. It uses Debian's conmon and runc.

The module has no list of versions on every proxy, so its own go.mod and go.sum decide all versions of the build.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from lab import image, repository
from lab.command import run
from lab.go import go_programs
from lab.packages import toolchain

MODULE = "github.com/cri-o/cri-o"
RELEASE = "1.34.0"
VERSION = f"{RELEASE}-1"
# As in the project's own packages, but for the paths, and for runc: Debian 12's crun refuses what this CRI-O writes.
CONFIG = """\
[crio.image]
signature_policy = "/etc/crio/policy.json"

[crio.runtime]
default_runtime = "runc"

[crio.runtime.runtimes.runc]
runtime_path = "/usr/sbin/runc"
runtime_root = "/run/runc"
monitor_path = "/usr/bin/conmon"
"""
POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}\n'


def vendor(disk: image.Image) -> repository.Repository:
    """A repository with the package ``cri-o``, and with what it needs that a node of this image lacks."""
    inputs = [str(disk.folder).encode(), *repository.source_of(__file__, toolchain.__file__)]
    return repository.ensure("cri-o", inputs, lambda pool: _build(disk, pool))


def _build(disk: image.Image, pool: Path) -> None:
    source = go_programs.source(f"{MODULE}@v{RELEASE}")
    programs = go_programs.ensure(
        go_programs.Build(
            name=f"cri-o-{RELEASE}",
            folder=source,
            packages=("./cmd/crio", "./test/copyimg"),
            cgo=True,
            tags="seccomp,containers_image_openpgp,exclude_graphdriver_btrfs",
            host_packages=("libc6-dev", "libseccomp-dev", "pkg-config"),
            usual_s=200,
            memory_mib=2048,
            disk_mib=3072,
        )
    )
    with TemporaryDirectory(prefix="trackbed-crio-") as folder:
        root = Path(folder)
        binaries, units, settings = root / "usr/bin", root / "lib/systemd/system", root / "etc/crio"
        for each in (binaries, units, settings / "crio.conf.d"):
            each.mkdir(parents=True)
        # copyimg puts an image into CRI-O's store without a registry.
        for name in ("crio", "copyimg"):
            shutil.copy(programs / name, binaries)
        pins = sorted((source / "pinns/src").glob("*.c"))
        run([go_programs.compiler(), "-std=c99", "-Os", "-static", "-o", binaries / "pinns", *pins])
        unit = (source / "contrib/systemd/crio.service").read_text()
        (units / "crio.service").write_text(unit.replace("/usr/local/bin/", "/usr/bin/"))
        (settings / "crio.conf.d/10-crio.conf").write_text(CONFIG)
        (settings / "policy.json").write_text(POLICY)
        fields = {
            "Package": "cri-o",
            "Version": VERSION,
            "Architecture": "amd64",
            "Depends": "conmon, runc, libseccomp2",
        }
        repository.deb(pool, fields, root)
    toolchain.fetch(disk, pool, "conmon", "runc")
