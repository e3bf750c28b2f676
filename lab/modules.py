"""Builds kernel modules that Debian does not build, or not as the lab needs them, for the node's exact kernel."""

import re
import shutil
from pathlib import Path

import attrs

from lab.apt import Apt
from lab.command import run
from lab.errors import LabError


@attrs.frozen
class Module:
    """A driver from the kernel's source."""

    source: str
    config: str


MODULES = (
    Module("drivers/infiniband/sw/rxe", "CONFIG_RDMA_RXE=m"),
    Module("drivers/infiniband/sw/siw", "CONFIG_RDMA_SIW=m"),
    Module("drivers/infiniband/hw/erdma", "CONFIG_INFINIBAND_ERDMA=m"),
    Module("drivers/net/netdevsim", "CONFIG_NETDEVSIM=m"),
    Module("drivers/net/ethernet/intel/igb", "CONFIG_IGB=m"),
)

# The lab's own module: no device that QEMU emulates has a driver with DCB.
DCBSIM = Path(__file__).parent / "dcbsim"


@attrs.frozen
class Patch:
    """A line of the kernel's source, and its replacement."""

    source: str
    line: str
    becomes: str

    def apply(self, tree: Path) -> None:
        """Change the file below ``tree``."""
        source = tree / self.source
        text = source.read_text()
        if text.count(self.line) != 1:
            raise LabError(
                f"{source.name} of this kernel is not as expected", "Adapt the patches in lab/modules.py to it."
            )
        source.write_text(text.replace(self.line, self.becomes))


RXE_VERBS = "drivers/infiniband/sw/rxe/rxe_verbs.c"
# QEMU's card never reports that its NVM is read (EEMNGCTL.CFG_DONE; hw/net/igb_core.c leaves it 0), so each reset waits for
# it in vain for 100 ticks: 0.4 s, three times when VFs are made. A real card reports it at once.
IGB_TIMEOUT = Patch(
    "drivers/net/ethernet/intel/igb/e1000_82575.c", "\ts32 timeout = PHY_CFG_TIMEOUT;\n", "\ts32 timeout = 1;\n"
)


def rxe_parent(tree: Path) -> Patch:
    """The kernel's rxe has no parent, so it does not appear under the PCI function, where device plugins look."""
    # Since Linux 6.12 rxe keeps no pointer to its netdev, and this function gets it.
    netdev = "ndev" if "struct net_device *ndev)" in (tree / RXE_VERBS).read_text() else "rxe->ndev"
    line = "\terr = ib_register_device(dev, ibdev_name, NULL);\n"
    return Patch(RXE_VERBS, line, f"\tdev->dev.parent = {netdev}->dev.parent;\n{line}")


def kernel_release(apt: Apt) -> str:
    """The kernel release that linux-image-amd64 would install, such as 6.1.0-44-amd64."""
    match = re.search(r"linux-image-(\S+-amd64)\b", apt.depends("linux-image-amd64"))
    if match is None:
        raise LabError("linux-image-amd64 depends on no kernel of a known name")
    return match[1]


def needed(release: str) -> tuple[str, ...]:
    """The packages with which modules for a kernel are built."""
    return (f"linux-headers-{release}", source_package(release), "make", "xz-utils")


def source_package(release: str) -> str:
    """Debian's package of a kernel's source. The folder in its archive has the same name."""
    return f"linux-source-{'.'.join(release.split('.')[:2])}"


def build(workshop: Path, release: str, log: Path) -> list[Path]:
    """Build all modules in a root file system that has what they need. Returns their .ko files."""
    work = workshop / "build"
    work.mkdir()
    tree = source_package(release)
    folders = [f"{tree}/{module.source}" for module in MODULES]
    run(["tar", "-C", work, "-xJf", workshop / "usr/src" / f"{tree}.tar.xz", *folders], log=log)
    for patch in (rxe_parent(work / tree), IGB_TIMEOUT):
        patch.apply(work / tree)
    shutil.copytree(DCBSIM, work / DCBSIM.name)
    options = {folder: [module.config] for folder, module in zip(folders, MODULES, strict=True)} | {DCBSIM.name: []}
    for folder, config in options.items():
        headers = f"/usr/src/linux-headers-{release}"
        run(["chroot", workshop, "make", "-j", "2", "-C", headers, f"M=/build/{folder}", *config, "modules"], log=log)
    built = [ko for folder in options for ko in sorted((work / folder).glob("*.ko"))]
    for ko in built:
        run(["strip", "--strip-debug", ko], log=log)
    return built
