"""A node with NVIDIA's driver, and one without, as pyinfra's fake connector answers."""

from __future__ import annotations

from typing import Any

from tasks.drivers import gpu_driver
from tests.deploy.conftest import DEBIAN, Answers, Node, file_answers

VERSION = "580.95.05"
KERNEL = "6.1.0-9-amd64"
BOOT = "00000000-0000-4000-8000-00000000000"
PREFIX = "GPU driver | "
USERS, SMI, STATE, REQUESTS = "nvidia-persiste |", "--query-gpu", "UnitFileState", "for task in *"
BUILDS, DPKG = "dkms status", "dpkg -l"
RUNNING = "ActiveState=active LoadState=loaded UnitFileState=enabled "
UBUNTU = {"*-release": ["/etc/os-release", "ID=ubuntu", "NAME=Ubuntu", 'VERSION_ID="22.04"', "---"]}
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
IN_MEMORY = "/sys/module/nvidia/version"
ABSENT = LOADED[:2]


def wants(node: Node, **data: Any) -> None:
    node.data = {"gpu_driver": {"version": VERSION, **data}}


def debs(version: str = f"{VERSION}-1", *more: str) -> Answers:
    names = ("nvidia-open", "nvidia-persistenced", *more)
    return {DPKG: ["ii  gpg  2  amd64  x", *(f"ii  {name}  {version}  amd64  x" for name in names)]}


def modules(nvidia: list[str], nouveau: list[str] | None = None) -> Answers:
    """The answers about both modules: the commands differ only in their argument. (Those about units begin like it.)"""
    return {" sh nvidia": nvidia, " sh nouveau": nouveau or ["path "]}


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
        "--show-keys": "EB693B3035CD5710E231E123A4B469963BF863CC",
        BUILDS: f"nvidia/{VERSION}, {KERNEL}, x86_64: installed",
        USERS: ["end"],
        REQUESTS: [f"{BOOT}1"],
        SMI: [f"version {VERSION}"],
        **file_answers("/etc/apt/sources.list.d/trackbed-nvidia-driver.sources", SOURCE),
        **file_answers(gpu_driver.PREFERENCES, PINS),
        **file_answers(gpu_driver.BLACKLIST, NO_NOUVEAU),
        **more,
    }


def fresh(distribution: Answers) -> Answers:
    """A node with nothing of it."""
    answers = {"uname -m": "x86_64", "uname -r": KERNEL, USERS: ["end"], REQUESTS: [f"{BOOT}1"]}
    # These commands contain " sh nvidia", too, and the first text that matches counts.
    repositories: Answers = {"madison": [], "repoquery": []}
    return {STATE: ["LoadState=not-found"], **repositories, **distribution, **answers, **modules(["path "])}
