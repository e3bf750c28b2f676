"""Installs NVIDIA's GPU driver: its packages, the modules that DKMS builds, the fabric manager and the persistence daemon.

Written from vendor documents. Only the checks were run on a machine with a GPU (one H100, driver 580.159.04).

Repositories, packages and the way to hold a version are those of NVIDIA's Driver Installation Guide
(docs.nvidia.com/datacenter/tesla/driver-installation-guide); the fabric manager is as in its User Guide
(docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide). Ubuntu's own packages are as in Ubuntu Server's guide
(documentation.ubuntu.com/server/how-to/graphics/install-nvidia-drivers).
The lab has stand-ins: packages of the same names, and a module nvidia that drives nothing.

A driver is never replaced while a process has a GPU open: programs of the new version do not work with loaded modules of
another ("Driver/library version mismatch"), so jobs that start later would fail. Without such a process the modules are loaded
again; if one cannot be unloaded, a reboot is requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attrs import field, frozen
from pyinfra.api.deploy import deploy
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.facts.server import Arch

from agent.spec.validators import Matches
from tasks import disruption, packages
from tasks.common.commands import Commands, refuse, script, warn
from tasks.common.data import Key, record
from tasks.common.facts import Lines
from tasks.common.failures import NodeError
from tasks.common.texts import HEADER, Present, Texts, written
from tasks.drivers.gpu_driver import fabric, modules, services, versions
from tasks.drivers.gpu_driver.services import FABRIC_MANAGER, PERSISTENCE
from tasks.host import kernel
from tasks.packages import Family, OperatingSystem, holds, vendor_repository
from tasks.packages.holds import HeldPackages
from tasks.packages.vendor_repository import Package, Repository

REPOSITORY = "nvidia-driver"
"""The name of the files of NVIDIA's repository on a node."""

BLACKLIST = "/etc/modprobe.d/trackbed-gpu-driver.conf"
PREFERENCES = "/etc/apt/preferences.d/trackbed-gpu-driver"
LEFTOVERS = (BLACKLIST, PREFERENCES, services.DROP_IN, fabric.AT_BOOT, *vendor_repository.files_of(REPOSITORY))

_CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"
# The folder of a release, and the key in it: its file and its fingerprint.
_2022 = ("3bf863cc.pub", "EB693B3035CD5710E231E123A4B469963BF863CC")
_2025 = ("8793F200.pub", "02182E60104FCDC26EAE1B8597A5D4CB8793F200")
_2026 = ("60DF8A40.pub", "14BAFBC7562AD710CA04E69905FBB6DA60DF8A40")
_RPM = ("D42D0685.pub", "610C7B14E068A878070DA4E99CD0A493D42D0685")
_FOLDERS = {
    ("debian", "12"): ("debian12", _2022),
    ("debian", "13"): ("debian13", _2025),
    ("ubuntu", "22.04"): ("ubuntu2204", _2022),
    ("ubuntu", "24.04"): ("ubuntu2404", _2022),
    ("ubuntu", "26.04"): ("ubuntu2604", _2026),
    **{(name, major): (f"rhel{major}", _RPM) for name in ("rhel", "rocky", "almalinux", "ol") for major in ("8", "9")},
}
_ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "sbsa"}

Source = Literal["vendor", "distribution"]


@frozen
class GpuDriver:
    """The driver. ``version``: as nvidia-smi prints it; all its packages are held at that.

    ``open``: the open kernel modules; False: the proprietary ones, for GPUs before Turing. ``fabric_manager``: the node has
    NVSwitches, whose fabric it sets up. ``repository``: used instead of NVIDIA's.
    """

    version: str = field(validator=Matches(versions.VERSION, "give it as nvidia-smi prints it, as 580.95.05"))
    source: Source = "vendor"
    open: bool = True
    fabric_manager: bool = False
    persistence: bool = True
    repository: Repository | None = None

    def __attrs_post_init__(self) -> None:
        if self.repository is not None and self.source != "vendor":
            raise ValueError("repository: it replaces NVIDIA's; give the source 'vendor', or remove it")

    @property
    def branch(self) -> int:
        """The first part of the version."""
        return int(self.version.split(".")[0])

    def streams(self) -> tuple[str, ...]:
        """The streams of dnf's module nvidia-driver that have it: that of its branch, else that of all branches."""
        return (f"{self.branch}-open", "open-dkms") if self.open else (f"{self.branch}-dkms", "latest-dkms")


RUN_FILE = "/usr/bin/nvidia-uninstall"
"""A program that only NVIDIA's installer puts there."""

GPU_DRIVER = Key[GpuDriver | None]("gpu_driver", None, record(GpuDriver))


@deploy("GPU driver")
def install() -> None:
    """Install the driver, load it and check it; without the key, do nothing.

    :raises NodeError: the distribution has no such packages, or NVIDIA has no repository for it.
    """
    wanted = GPU_DRIVER.here()
    if wanted is None:
        return
    # The programs of another version do not work with the loaded modules, so these must be replaced at once.
    if host.get_fact(modules.LoadedVersion) not in (None, wanted.version) and disruption.deferred(
        f"the GPU driver {wanted.version}", disruption.DRIVER_RELOAD, of_nics=False
    ):
        return
    system = packages.system()
    names = package_names(wanted, system)
    # First: with apt's preferences for another version, apt itself would replace the driver at its next upgrade.
    refuse_while_in_use(name="No driver in use replaced", names=names, version=wanted.version, family=system.family)
    # Before the packages: they may load the driver.
    text = "".join(f"blacklist {name}\n" for name in modules.REPLACED)
    text = f"{HEADER}{text}options {modules.NOUVEAU} modeset=0\n"
    written(name="The kernel's own drivers not loaded", path=BLACKLIST, text=text)
    vendors = wanted.source == "vendor"
    repository = (wanted.repository or cuda_repository(system, host.get_fact(Arch))) if vendors else None
    vendor_repository.configure(REPOSITORY, repository, system.family)
    # Before the packages: the first one depends on others, of which the newest would be installed.
    if system.family == "debian":
        written(name="Version", path=PREFERENCES, text=preferences(wanted.version))
    else:
        enable_stream(name="Module stream", names=names, version=wanted.version, streams=wanted.streams())
        lock(name="Version", version=wanted.version)
    install_packages(name="Packages", names=names, version=wanted.version, family=system.family)
    modules.build(name="Modules for the running kernel", version=wanted.version)
    modules.load(name="Loaded modules", wanted_open=wanted.open, version=wanted.version)
    if wanted.fabric_manager:
        fabric.subnet_manager(name="NVLink subnet manager", family=system.family)
    services.start(fabric_manager=wanted.fabric_manager, persistence=wanted.persistence)
    check(name="nvidia-smi", version=wanted.version, fabric_manager=wanted.fabric_manager)


def cuda_repository(system: OperatingSystem, architecture: str) -> Repository:
    """NVIDIA's repository of CUDA and the driver for a node.

    :raises NodeError: none is known for this distribution.
    """
    release = system.version if system.identity == "ubuntu" else str(system.major)
    known = _FOLDERS.get((system.identity, release))
    if known is None or architecture not in _ARCHITECTURES:
        raise NodeError(
            f"{host.name}.gpu_driver.repository: NVIDIA's repository for {system} on {architecture} is not known; look for "
            f"its folder in {_CUDA}/, and give its uri, key and fingerprint here"
        )
    folder, (file, fingerprint) = known
    uri = f"{_CUDA}/{folder}/{_ARCHITECTURES[architecture]}"
    return Repository(f"{uri}/" if system.family == "debian" else uri, f"{uri}/{file}", fingerprint, suite="/")


def package_names(wanted: GpuDriver, system: OperatingSystem) -> tuple[str, ...]:
    """The names of the packages, which depend on all others.

    :raises NodeError: the distribution has no such packages.
    """
    names: list[str] = []
    if wanted.source == "vendor":
        names.append("nvidia-open" if wanted.open else "cuda-drivers")
        # On Ubuntu the daemon is part of another package (nvidia-compute-utils) up to branch 580. The guide renames the
        # packages from 590 on.
        if wanted.persistence and (system.identity != "ubuntu" or wanted.branch >= 590):
            names.append(PERSISTENCE)
        fabric_manager = _fabric_manager(wanted.branch, system.family)
    elif system.identity == "ubuntu":
        kind = "-open" if wanted.open else ""
        names += [f"nvidia-headless-{wanted.branch}-server{kind}", f"nvidia-utils-{wanted.branch}-server"]
        fabric_manager = f"{FABRIC_MANAGER}-{wanted.branch}"
    else:
        raise NodeError(
            f"{host.name}.gpu_driver.source: only Ubuntu's own packages are supported, and the node has {system}; give the "
            "source 'vendor'"
        )
    return (*names, fabric_manager) if wanted.fabric_manager else tuple(names)


def _fabric_manager(branch: int, family: Family) -> str:
    # Since branch 580 the package has the same name everywhere.
    if branch >= 580:
        return FABRIC_MANAGER
    return f"{FABRIC_MANAGER}-{branch}" if family == "debian" else "nvidia-fabric-manager"


def preferences(version: str) -> str:
    """apt_preferences(5) that hold all packages of the driver at a version, as NVIDIA's pinning packages do.

    Packages of other versions, such as those of the container toolkit, are not affected: no version of theirs matches.
    """
    names = "*nvidia* *cuda-drivers* libcuda* libnv* libxnvctrl* xserver-xorg-video-nvidia*"
    return f"{HEADER}Package: {names}\nPin: version {version}-*\nPin-Priority: 1001\n"


MODULE_FILE = "/etc/dnf/modules.d/nvidia-driver.module"

# dnf refuses to enable another stream beside one that is enabled. A repository for RHEL 10 has no modules, nor may a mirror.
_STREAM = """
for stream; do
  if dnf -q -y module list "nvidia-driver:$stream" >/dev/null 2>&1; then
    dnf -q -y module reset nvidia-driver
    dnf -q -y module enable "nvidia-driver:$stream"
    exit 0
  fi
done
echo 'the repositories have no such stream of nvidia-driver'
"""


@operation()
def enable_stream(names: tuple[str, ...], version: str, streams: tuple[str, ...]) -> Commands:
    """For the RHEL family: enable the stream of the driver, before its packages are installed.

    NVIDIA's repositories for RHEL 8 and 9 have a module. dnf sees only packages of its enabled stream, by default the open one.
    """
    if not versions.missing(names, version, "rhel") or holds.has_dnf5(packages.installed("rhel")):
        host.noop("no package is to be installed")
        return
    text = host.get_fact(Texts, paths=(MODULE_FILE,)).get(MODULE_FILE, "")
    lines = text.replace(" ", "").splitlines()
    if "state=enabled" in lines and f"stream={streams[0]}" in lines:
        host.noop(f"the stream {streams[0]} is enabled")
    else:
        yield script(_STREAM, *streams)


# Without any lock the next update of the system would replace the driver. So the former ones return if there are no new ones.
_LOCK = (
    holds.NOTED
    + """
set -f  # locks have wildcards
wanted=$2 remedy=$3 notes=$1 before=$(locks '') lost=; shift 3
if [ $# != 0 ]; then dnf versionlock delete "$@"; fi
if noted "$notes" dnf versionlock add "$wanted"; then exit 0; fi
for lock in $before; do locks '' | grep -qxFe "$lock" || lost="$lost $lock"; done
# shellcheck disable=SC2086  # a lock is a word
if [ -n "$lost" ]; then dnf versionlock add --raw $lost; fi
echo "$remedy" >&2; exit 1
"""
)


@operation()
def lock(version: str) -> Commands:
    """For the RHEL family: dnf's version locks on all packages of the driver at a version, as NVIDIA's guide has them."""
    locks = {
        name: locked
        for name, locked in host.get_fact(HeldPackages, family="rhel").items()
        if locked and versions.is_drivers(name, locked)
    }
    others = sorted(name for name, locked in locks.items() if not versions.is_at(version, locked))
    if locks and not others:
        host.noop(f"the driver's packages are locked at {version}")
        return
    yield from holds.lock_plugin(packages.installed("rhel"))
    yield script(_LOCK, holds.PATH, f"*{versions.LOCKED}*{version}*", _remedy(version, ("the driver",)), *others)


def _remedy(version: str, names: Sequence[str]) -> str:
    return f"gpu_driver: the repository must have version {version} of {', '.join(names)}"


@operation()
def refuse_while_in_use(names: tuple[str, ...], version: str, family: Family) -> Commands:
    """Refuse to install the driver, or another version of a package, while a process has a GPU open.

    Refuse also if the policy does not allow a reload now: after pyinfra prepared, a window may have ended, or udev may have
    loaded the driver.
    """
    have = packages.installed(family)
    wrong = [name for name in versions.missing(names, version, family) if name in have or name == names[0]]
    wrong += [name for name in versions.left(version, family) if name not in wrong]
    if wrong and host.get_fact(Present, paths=(RUN_FILE,)):
        yield refuse(
            "gpu_driver: the node has a driver of NVIDIA's installer (.run), with whose files those of packages would be "
            f"mixed; drain the node, remove that driver ({RUN_FILE} --silent), and deploy again"
        )
        return
    loaded = host.get_fact(modules.LoadedVersion) if wrong and host.state.is_executing else None
    if loaded not in (None, version) and (why := disruption.why_not(disruption.DRIVER_RELOAD, of_nics=False)):
        yield refuse(f"gpu_driver: {', '.join(wrong)} {version} is not installed beside {loaded}: {why}; deploy again")
        return
    users = host.get_fact(modules.GpuUsers) if wrong else []
    if users:
        yield refuse(
            f"gpu_driver: {', '.join(wrong)} {version} is not installed while GPUs are in use by {modules.named(users)}: "
            "programs of the new version would not work with the loaded modules; drain the node, and deploy again"
        )
    else:
        host.noop("nothing is replaced under a process")


@operation()
def install_packages(names: tuple[str, ...], version: str, family: Family) -> Commands:
    """Install the packages at the version, even as a downgrade."""
    missing = versions.missing(names, version, family)
    remedy = _remedy(version, names)
    if missing:
        wanted = tuple(Package(name, f"{version}-*") for name in names)
        yield from vendor_repository.install(family, wanted, modules.MODULE, remedy)
    # A downgrade of these leaves their dependencies as they are: they require a version or any later one. And a deploy may have
    # been interrupted in between.
    left = [name for name in versions.left(version, family) if name not in missing]
    if left:
        others = tuple(Package(name, f"{version}-*") for name in left)
        yield from vendor_repository.install(family, others, modules.MODULE, remedy)
    elif not missing:
        host.noop(f"installed: {', '.join(names)} {version}")


_CHECK = (
    modules.GPUS
    + """
command -v nvidia-smi >/dev/null || { echo "missing"; exit 0; }
word=version code=0
output=$(timeout 120 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1) || code=$?
case $code in
0 | 14) ;;  # 14: "infoROM is corrupted" (nvidia-smi(1)), with which a GPU works
124) word=failed output='no answer within 120 s; look at the kernel log (dmesg), and reboot the node' ;;
*) word=failed ;;
esac
printf '%s\\n' "$output" | sort -u | sed "/^WARNING: /{s/^/warning /;b};s/^/$word /"
# A GPU that the driver cannot initialise is bound to it, and not shown.
shown=$(printf '%s\\n' "$output" | grep -c '^[0-9.]*$' || true) bound=$(nvidia_gpus "${1-}" | grep -c ' nvidia$' || true)
if [ "$word" = version ] && [ "$shown" -lt "$bound" ]; then word=fewer; echo "fewer $shown of $bound"; fi
if [ "$word" != version ]; then
  dmesg 2>/dev/null | grep -a NVRM | tail -n 4 | sed 's/^\\[[^]]*\\] *//; s/^/kernel /'
  exit 0
fi
"""
    + fabric.STATES
)


class SmiReport(Lines):
    """The output of nvidia-smi.

    A line `version VERSION` for each version that a GPU reports, `warning TEXT`, and `fabric TEXT` for each GPU that NVLink's
    fabric has not registered; or `failed TEXT`, or `missing`. `fewer N of M` if the driver has more GPUs; after that or a
    failure, `kernel TEXT`.
    """

    shell = _CHECK


@operation()
def check(version: str, fabric_manager: bool) -> Commands:
    """Fail unless nvidia-smi prints the version, and the fabric has registered all GPUs. This changes nothing."""
    if kernel.skip_until_booted("the driver is checked"):
        return
    if not host.state.is_executing or modules.reboot_due() or fabric.awaits_reboot():
        host.noop("the driver is checked once it and the fabric's drivers are loaded")
        return
    report = host.get_fact(SmiReport)
    if _of(report, "fabric") and fabric_manager:
        yield script(fabric.WAIT)
        report = host.get_fact(SmiReport)
    for text in _of(report, "warning"):
        warn(host, f"gpu_driver: nvidia-smi says: {text}")
    others = [line for line in report if not line.startswith(("fabric ", "warning ", "kernel ", "fewer "))]
    said = "; ".join(_of(report, "kernel"))
    of_kernel = f"; the kernel's last messages of the driver: {said}" if said else ""
    if others == ["missing"]:
        yield refuse("gpu_driver: the node has no nvidia-smi, which the driver's packages bring; install them again")
    elif others != [f"version {version}"]:
        text = "; ".join(line.partition(" ")[2] for line in others) or "nothing"
        yield refuse(f"gpu_driver: nvidia-smi should print the driver's version {version}, but says: {text}{of_kernel}")
    elif fewer := _of(report, "fewer"):
        yield refuse(
            f"gpu_driver: nvidia-smi shows {fewer[0]} GPUs that the driver has, and could not initialise the others; reboot "
            f"the node, and if they stay away, look at their power and slots{of_kernel}"
        )
    elif unregistered := _of(report, "fabric"):
        yield refuse(fabric.refusal(unregistered, fabric_manager))
    else:
        host.noop(f"nvidia-smi: driver {version}")


def _of(report: list[str], word: str) -> list[str]:
    """The texts of the lines that begin with a word."""
    return [line.removeprefix(f"{word} ") for line in report if line.startswith(f"{word} ")]
