"""Makes a Debian look like Rocky Linux 9: dnf, an RPM database, dracut, and a python3 that is too old for the agent.

Debian packages dnf, rpm and dracut. dnf installs from a repository on the node's disk, which has Debian's packages under the
names of the RHEL family. There is no grubby, no SELinux and no NetworkManager, and the kernel and systemd are Debian's.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from lab import apt, host, rpm
from lab.command import run
from lab.debian import Debian
from lab.lookalikes.lookalike import Lookalike

OS_RELEASE = """\
NAME="Rocky Linux"
VERSION="9.4 (Blue Onyx)"
ID="rocky"
ID_LIKE="rhel centos fedora"
VERSION_ID="9.4"
PLATFORM_ID="platform:el9"
PRETTY_NAME="Rocky Linux 9.4 (Blue Onyx)"
"""
PRESENT = (
    "curl",
    "ethtool",
    "gnupg2",
    "iproute",
    "kernel",
    "kernel-core",
    "kernel-modules",
    "kmod",
    "libibverbs",
    "pciutils",
    "python3",
    "rdma-core",
    "systemd",
    "tar",
)
"""Packages that the database lists as installed. The image has the same programs from Debian."""

AVAILABLE = {
    "ibverbs-utils": "libibverbs-utils",
    "infiniband-diags": "infiniband-diags",
    "jq": "jq",
    "perftest": "perftest",
    "rdmacm-utils": "librdmacm-utils",
}
"""Debian's packages that the repository offers, and their names there."""

REPOSITORY = "srv/rpms"
REPO = f"""\
[baseos]
name=Rocky Linux 9, of Trackbed's lab
baseurl=file:///{REPOSITORY}
gpgcheck=0
"""
# What packages with scripts need.
SHELL = rpm.Rpm("bash", "9.4-1", provides=("/bin/sh",))
# dnf takes $releasever from what provides system-release.
RELEASE = rpm.Rpm("rocky-release", "9.4-1", provides=("system-release = 9.4-1", "system-release(releasever) = 9"))
LOCK_PLUGIN = "python3-dnf-plugin-versionlock"
LOCK_FILES = (
    "etc/dnf/plugins/versionlock.conf",
    "etc/dnf/plugins/versionlock.list",
    "usr/lib/python3/dist-packages/dnf-plugins/versionlock.py",
)

PLATFORM_PYTHON = "usr/libexec/platform-python"
# In RHEL 9, python3 is Python 3.9. Newer ones are packages of their own.
OLD_PYTHON = f"""\
#!/bin/sh
LAB_PYTHON=3.9 exec /{PLATFORM_PYTHON} "$@"
"""
OLD_VERSION = """\
import collections, os, sys
if os.environ.pop("LAB_PYTHON", None):
    fields = "major minor micro releaselevel serial"
    sys.version_info = collections.namedtuple("version_info", fields)(3, 9, 18, "final", 0)
"""
ABSENT = (
    # RHEL has this plugin of dnf in a package of its own, which is not installed.
    "usr/lib/python3/dist-packages/dnf-plugins/local.py",
    "etc/dnf/plugins/local.conf",
    "usr/bin/apt*",
    "usr/bin/dpkg*",
    "usr/bin/lsinitramfs",
    "usr/lib/apt",
    "usr/sbin/update-initramfs",
    "etc/apt",
    "etc/debian_version",
)


def disguise(root: Path, release: str, debian: Debian, log: Path) -> None:
    """Change the root file system. dpkg's database stays: the lab looks the kernel's version up in it."""
    host.ensure_packages(rpm.PROGRAMS)
    (root / "usr/lib/os-release").write_text(OS_RELEASE)
    (root / "etc/rocky-release").write_text("Rocky Linux release 9.4 (Blue Onyx)\n")
    # Debian's rpm has its database below the user's home.
    (root / "etc/rpm").mkdir(exist_ok=True)
    (root / "etc/rpm/macros").write_text("%_dbpath /var/lib/rpm\n")
    pool = root / REPOSITORY
    pool.mkdir(parents=True)
    with apt.of_nodes(debian) as ours:
        rpm.from_debs(pool, ours.fetch(root / "var/lib/dpkg/status", *AVAILABLE), AVAILABLE, scripts=False)
    _move(pool, root, rpm.Rpm(LOCK_PLUGIN, "4.3.1-1"), LOCK_FILES)
    _python(root, pool)
    rpm.index(pool)
    (root / "etc/yum.repos.d").mkdir(exist_ok=True)
    (root / "etc/yum.repos.d/baseos.repo").write_text(REPO)
    _database(root, log)
    # Debian's dracut has Debian's file name.
    dracut = root / "usr/bin/dracut"
    dracut.write_text(dracut.read_text().replace("/boot/initrd.img-${kernel}", "/boot/initramfs-${kernel}.img"))
    (root / f"boot/initrd.img-{release}").rename(root / f"boot/initramfs-{release}.img")
    run(["rm", "-rf", *(path for pattern in ABSENT for path in root.glob(pattern))])


def _move(pool: Path, root: Path, package: rpm.Rpm, files: tuple[str, ...]) -> None:
    """Move files of the image into a package."""
    with TemporaryDirectory(prefix="trackbed-rocky-") as folder:
        for file in files:
            target = Path(folder) / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(root / file, target)
        rpm.build(pool, package, Path(folder))


def _python(root: Path, pool: Path) -> None:
    """Let `python3` say that it is Python 3.9, and put the interpreter into a package python3.11. dnf runs a copy of it."""
    python = root / "usr/bin/python3.11"
    platform = root / PLATFORM_PYTHON
    platform.parent.mkdir(exist_ok=True)
    shutil.copy(python, platform)
    _move(pool, root, rpm.Rpm("python3.11", "3.11.7-1"), ("usr/bin/python3.11",))
    old = root / "usr/bin/python3"
    old.unlink()
    old.write_text(OLD_PYTHON)
    old.chmod(0o755)
    # Python runs the import lines of .pth files whenever it starts.
    (root / "usr/lib/python3/dist-packages/lab_version.py").write_text(OLD_VERSION)
    (root / "usr/lib/python3/dist-packages/lab_version.pth").write_text("import lab_version\n")
    dnf = root / "usr/bin/dnf-3"
    dnf.write_text(dnf.read_text().replace("#!/usr/bin/python3\n", f"#!/{PLATFORM_PYTHON}\n"))


def _database(root: Path, log: Path) -> None:
    """Record as installed what the image has."""
    with TemporaryDirectory(prefix="trackbed-rocky-", dir=root / "srv") as folder:
        present = [SHELL, RELEASE, *(rpm.Rpm(name, "9.4-1") for name in PRESENT)]
        packages = [rpm.build(Path(folder), package) for package in present]
        inside = [f"/{package.relative_to(root)}" for package in packages]
        run(["chroot", root, "rpm", "--install", "--justdb", "--nodeps", "--force-debian", *inside], log=log)


ROCKY_9 = Lookalike(
    "rocky-9",
    packages=("curl", "dnf", "dnf-plugins-core", "dracut-core", "gpg", "rpm"),
    # jq and these come by dnf.
    lacks=("ibverbs-utils", "perftest", "rdmacm-utils"),
    disguise=disguise,
)
