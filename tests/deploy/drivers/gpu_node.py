"""A node with NVIDIA's driver, and one without, as pyinfra's fake connector answers."""

from typing import Any

from tasks.drivers import gpu_driver
from tasks.drivers.gpu_driver.modules import GpuUsers, LoadedVersion
from tasks.packages import AvailableVersions
from tasks.packages.dkms import Builds, ModuleState
from tasks.packages.vendor_repository import KeyFingerprints
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import DEBIAN, Answers, Node, Result, file_answers, of
from tests.deploy.systems import dpkg

VERSION = "580.95.05"
KERNEL = "6.1.0-9-amd64"
BOOT = "00000000-0000-4000-8000-00000000000"
PREFIX = "GPU driver | "
USERS, SMI, STATE, REQUESTS = of(GpuUsers), "--query-gpu", "UnitFileState", of(NodeRebootRequests)
BUILDS = of(Builds)
RUNNING = "ActiveState=active LoadState=loaded UnitFileState=enabled "
HEADER = "# Written by Trackbed; changes here are overwritten.\n"
SOURCE = f"""\
{HEADER}Types: deb
URIs: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/
Suites: /
Signed-By: /etc/apt/keyrings/trackbed-nvidia-driver.gpg
"""
PINS = (
    f"{HEADER}Package: *nvidia* *cuda-drivers* libcuda* libnv* libxnvctrl* xserver-xorg-video-nvidia*\n"
    f"Pin: version {VERSION}-*\nPin-Priority: 1001\n"
)
NO_NOUVEAU = f"{HEADER}blacklist nouveau\nblacklist nova_core\nblacklist nova_drm\noptions nouveau modeset=0\n"
LOADED = ["path /lib/modules/K/updates/dkms/nvidia.ko", "installed AB", "users 0", "loaded AB"]
STALE = [*LOADED[:3], "loaded CD"]
IN_MEMORY = of(LoadedVersion)
ABSENT = LOADED[:2]


def wants(node: Node, **data: Any) -> None:
    node.data = {"gpu_driver": {"version": VERSION, **data}}


def deploy(node: Node, answers: Answers, later: Answers | None = None, **data: Any) -> Result:
    """Install the driver on a node that wants it so."""
    wants(node, **data)
    return node.deploy(gpu_driver.install, answers, later)


def debs(version: str = f"{VERSION}-1", *more: str) -> Answers:
    return dpkg("gpg", *(f"{name}={version}" for name in ("nvidia-open", "nvidia-persistenced", *more)))


def modules(nvidia: list[str], nouveau: list[str] | None = None) -> Answers:
    """The answers about the modules."""
    return {of(ModuleState, "nvidia"): nvidia, of(ModuleState, "nouveau"): nouveau or ["path "]}


def there(nvidia: list[str] = LOADED, **more: Any) -> Answers:
    """A node with the driver, loaded and working."""
    return {
        STATE: [RUNNING],
        IN_MEMORY: VERSION,
        "licence=$(modinfo": ["installed", "driver Dual MIT/GPL"],
        **modules(nvidia),
        **DEBIAN,
        "uname -m": "x86_64",
        "uname -r": KERNEL,
        **debs(),
        of(KeyFingerprints): "EB693B3035CD5710E231E123A4B469963BF863CC",
        BUILDS: f"nvidia/{VERSION}, {KERNEL}, x86_64: installed",
        USERS: [],
        REQUESTS: [f"{BOOT}1"],
        SMI: [f"version {VERSION}"],
        **file_answers("/etc/apt/sources.list.d/trackbed-nvidia-driver.sources", SOURCE),
        **file_answers(gpu_driver.PREFERENCES, PINS),
        **file_answers(gpu_driver.BLACKLIST, NO_NOUVEAU),
        **more,
    }


def due(task: str, reason: str = "x", boot: str = "1") -> Answers:
    """A request of a task for a reboot, in the first boot or another, on a node in the second one."""
    return {REQUESTS: [f"{BOOT}1", f"{task} {BOOT}{boot} {reason} "]}


def fresh(distribution: Answers) -> Answers:
    """A node with nothing of it."""
    answers = {"uname -m": "x86_64", "uname -r": KERNEL, USERS: [], REQUESTS: [f"{BOOT}1"]}
    repositories: Answers = {of(AvailableVersions): []}
    return {STATE: ["LoadState=not-found"], **repositories, **distribution, **answers, **modules(["path "])}
