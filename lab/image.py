"""Builds the node image: Debian by mmdebstrap, on a disk made by mke2fs. It is cached by a hash of its inputs."""

import os
import shutil
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import attrs

from lab import apt, cache, host, lookalikes, modules
from lab.command import run
from lab.debian import DEBIANS, Debian, of_nodes
from lab.errors import LabError
from lab.lock import exclusive
from lab.lookalikes.lookalike import Lookalike
from lab.progress import step

# jq is left out on purpose: the deploy must install it with the node's real apt.
PACKAGES = (
    "ca-certificates",
    "chrony",
    "dbus",
    "ethtool",
    "ibverbs-utils",
    "iperf3",
    "iproute2",
    "iputils-ping",
    "irqbalance",
    "kmod",
    "linux-image-amd64",
    "netbase",
    "numactl",
    "openssh-server",
    "pciutils",
    "perftest",
    "procps",
    "python3",
    "qperf",
    "rdma-core",
    "rdmacm-utils",
    "sudo",
    "systemd",
    "systemd-sysv",
    "udev",
    "zstd",
)
# Each of these makes an emulated boot seconds longer, or disturbs tests at random times.
MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@tty1.service",
    "modprobe@configfs.service",
    "modprobe@dm_mod.service",
    "modprobe@drm.service",
    "modprobe@efi_pstore.service",
    "modprobe@fuse.service",
    "modprobe@loop.service",
    "proc-sys-fs-binfmt_misc.automount",
    "rdma-ndd.service",
    "sys-kernel-tracing.mount",
    "systemd-binfmt.service",
    "systemd-networkd-wait-online.service",
    "systemd-update-utmp-runlevel.service",
)
ENABLED = ("chrony.service", "systemd-networkd.service", "serial-getty@ttyS0.service", "ssh.service")
DISK_MIB = 4096
HERE = Path(__file__).parent
ROOTFS = HERE / "rootfs"
HOST_CAS = Path("/usr/local/share/ca-certificates")


_LIKE = "-like-"
"""Separates the Debian from what it looks like, in the name of an image's folder: image-bookworm-like-rocky-9-KEY."""


@attrs.frozen
class Image:
    """A finished image. It is never written to again."""

    folder: Path

    @property
    def debian(self) -> Debian:
        """The Debian in it."""
        name = self.folder.name.removeprefix("image-").rpartition("-")[0].partition(_LIKE)[0]
        return next(debian for debian in DEBIANS if debian.name == name)

    @property
    def disk(self) -> Path:
        """The root file system, raw and sparse."""
        return self.folder / "disk.raw"

    @property
    def kernel(self) -> Path:
        """The kernel, which QEMU loads without a boot loader."""
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """The initial RAM disk."""
        return self.folder / "initrd.img"

    def complete(self) -> bool:
        """Whether all files are there: the cache may have been cleaned."""
        return self.disk.exists() and self.kernel.exists() and self.initrd.exists()


def ensure() -> Image:
    """The current image. It is built first if it is not cached."""
    debian, like = of_nodes(), lookalikes.of_nodes()
    sources = apt.sources_of(debian)
    options = apt.carried_options()
    name = f"{debian.name}{_LIKE}{like.name}" if like else debian.name
    image = Image(cache.home() / f"image-{name}-{_key(like, sources, options)}")
    if image.complete():
        return image
    if os.geteuid() != 0:
        raise LabError("building the node image needs root", host.AS_ROOT)
    image.folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(image.folder.parent / "lock", "another build of the image is under way"):
        # The command that held the lock may have built it.
        if not image.complete():
            _build(image, like, sources, options)
    return image


def _key(like: Lookalike | None, sources: tuple[apt.Source, ...], options: tuple[str, ...]) -> str:
    digest = sha256()
    files = [
        HERE / "apt.py",
        HERE / "image.py",
        HERE / "modules.py",
        *sorted(modules.DCBSIM.iterdir()),
        *sorted(ROOTFS.rglob("*")),
        *_host_cas(),
        *([HERE / "rpm.py", *sorted((HERE / "lookalikes").glob("*.py"))] if like else []),
    ]
    for file in files:
        if file.is_file():
            # The path of the repository does not matter.
            name = file.relative_to(HERE) if file.is_relative_to(HERE) else file
            digest.update(f"\0{name}\0".encode() + file.read_bytes())
    digest.update("\n".join([*(source.line() for source in sources), *options]).encode())
    return digest.hexdigest()[:16]


def _build(image: Image, like: Lookalike | None, sources: tuple[apt.Source, ...], options: tuple[str, ...]) -> None:
    work = image.folder.with_name("building")
    # This is left of an interrupted build: by the lock no other build runs. Its mounts ended with its mount namespace.
    run(["rm", "-rf", "--one-file-system", work])
    work.mkdir()
    log = image.folder.parent / "build.log"
    log.write_text("")
    host.ensure_packages()
    with apt.throwaway(sources, apt.preferences(image.debian)) as ours:
        release = modules.kernel_release(ours)
    workshop = work / "workshop"
    with step(f"image 1/3: kernel modules for {release}", usual_s=100):
        # The programs of its headers need the C library of that Debian.
        _bootstrap(workshop, image.debian, sources, options, modules.needed(release), log)
        built = modules.build(workshop, release, log)
    root = work / "root"
    packages = [package for package in PACKAGES if like is None or package not in like.lacks]
    packages += like.packages if like else ()
    with step(f"image 2/3: Debian {image.debian.version}, {len(packages)} packages and what they need", usual_s=50):
        _bootstrap(root, image.debian, sources, options, packages, log)
        if not (root / f"boot/vmlinuz-{release}").exists():
            raise LabError(f"the image did not get kernel {release}", "The mirror changed meanwhile: run it again.")
        _furnish(root, release, built, log)
        done = Image(work / "image")
        done.folder.mkdir()
        shutil.copy(root / f"boot/vmlinuz-{release}", done.kernel)
        shutil.copy(root / f"boot/initrd.img-{release}", done.initrd)
    if like is not None:
        with step(f"image 2/3: to look like {like.name}", usual_s=60):
            like.disguise(root, release, image.debian, log)
    with step("image 3/3: disk", usual_s=10):
        # Lazy initialisation would have each node write to its overlay in the background.
        extended = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
        run(
            ["mke2fs", "-q", "-t", "ext4", "-L", "root", "-E", extended, "-d", root, done.disk, f"{DISK_MIB}M"], log=log
        )
    run(["rm", "-rf", image.folder])
    done.folder.rename(image.folder)
    run(["rm", "-rf", "--one-file-system", work])


def _bootstrap(
    root: Path,
    debian: Debian,
    sources: tuple[apt.Source, ...],
    options: tuple[str, ...],
    packages: Sequence[str],
    log: Path,
) -> None:
    lines = root.with_name("sources.list")
    lines.write_text("".join(f"{source.line()}\n" for source in sources))
    preferred = []
    if preferences := apt.preferences(debian):
        file = root.with_name("preferences")
        file.write_text(preferences)
        preferred = [f'--setup-hook=mkdir -p "$1/etc/apt" && cp {file} "$1/etc/apt/preferences"']
    # The initramfs is made while the kernel is installed, so its configuration must be there before.
    early = f'mkdir -p "$1/etc" && cp -rT {ROOTFS}/etc/initramfs-tools "$1/etc/initramfs-tools"'
    run(
        [
            # If the build is interrupted, its processes and mounts end with its namespaces.
            *(
                "unshare",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "mmdebstrap",
                "--mode=root",
                "--variant=minbase",
            ),
            f"--include={','.join(packages)}",
            '--aptopt=Acquire::Languages "none"',
            *(f"--aptopt={option}" for option in options),
            # Keep the lists, so that `apt-get update` in a node fetches only changes.
            "--skip=cleanup/apt/lists",
            *preferred,
            f"--essential-hook={early}",
            *(debian.suite, str(root), str(lines)),
        ],
        log=log,
    )


def _furnish(root: Path, release: str, built: list[Path], log: Path) -> None:
    """Add everything that does not come from a package."""
    updates = root / f"lib/modules/{release}/updates"
    updates.mkdir()
    for module in built:
        shutil.copy(module, updates)
    run(["depmod", "-b", root, release], log=log)

    for file in ("etc/resolv.conf", "etc/hostname", "etc/hosts"):
        (root / file).unlink(missing_ok=True)
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    run(["cp", "-rT", "--no-preserve=mode", ROOTFS, root], log=log)
    run(["chroot", root, "systemd-sysusers"], log=log)
    # Empty: systemd then uses the machine ID on the kernel's command line, and does not treat the boot as a first boot.
    (root / "etc/machine-id").write_text("")

    # A node reaches a proxy on this host's loopback at the gateway's address.
    for conf in (root / "etc/apt/apt.conf.d").glob("99mmdebstrap*"):
        conf.write_text(conf.read_text().replace("//127.0.0.1", "//10.0.2.2").replace("//localhost", "//10.0.2.2"))
    for ca in _host_cas():
        shutil.copy(ca, root / "usr/local/share/ca-certificates")
    run(["chroot", root, "update-ca-certificates"], log=log)
    run(["chroot", root, "systemctl", "mask", *MASKED], log=log)
    run(["chroot", root, "systemctl", "enable", *ENABLED], log=log)
    # apt's own index of the lists, which takes an emulated CPU half a minute to make.
    run(["chroot", root, "apt-cache", "gencaches"], log=log)


def _host_cas() -> list[Path]:
    return sorted(HOST_CAS.glob("*.crt"))
