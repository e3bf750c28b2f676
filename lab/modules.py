"""Builds kernel modules that Debian does not build, or not as the lab needs them, on this host for the node's exact kernel."""

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


# The kernel's rxe has no parent, so it does not appear under the PCI function, where device plugins look.
RXE_PARENT = Patch(
    "drivers/infiniband/sw/rxe/rxe_verbs.c",
    "\terr = ib_register_device(dev, ibdev_name, NULL);\n",
    "\tdev->dev.parent = rxe->ndev->dev.parent;\n\terr = ib_register_device(dev, ibdev_name, NULL);\n",
)
PATCHES = (
    RXE_PARENT,
    # QEMU's card never reports that its NVM is read (EEMNGCTL.CFG_DONE; hw/net/igb_core.c leaves it 0), so each reset waits for
    # it in vain for 100 ticks: 0.4 s, three times when VFs are made. A real card reports it at once.
    Patch("drivers/net/ethernet/intel/igb/e1000_82575.c", "\ts32 timeout = PHY_CFG_TIMEOUT;\n", "\ts32 timeout = 1;\n"),
)


def kernel_release(apt: Apt) -> str:
    """The kernel release that linux-image-amd64 would install, such as 6.1.0-44-amd64."""
    match = re.search(r"linux-image-(\S+-amd64)\b", apt.depends("linux-image-amd64"))
    if match is None:
        raise LabError("linux-image-amd64 depends on no kernel of a known name")
    return match[1]


def build(apt: Apt, release: str, work: Path, log: Path) -> list[Path]:
    """Build all modules below `work` and return their .ko files; the host's own /usr/src is not touched."""
    version = apt.candidate("linux-image-amd64")
    headers = f"linux-headers-{release}"
    common = f"linux-headers-{release.removesuffix('-amd64')}-common"
    debs = work / "debs"
    debs.mkdir(parents=True)
    packages = [f"{name}={version}" for name in (headers, common, "linux-kbuild-6.1", "linux-source-6.1")]
    # apt always downloads into the working directory.
    run(["env", "-C", debs, "apt-get", *apt.options(), "-q", "download", *packages], log=log)
    for deb in sorted(debs.glob("*.deb")):
        run(["dpkg-deb", "-x", deb, work], log=log)

    tree = "linux-source-6.1"
    folders = [f"{tree}/{module.source}" for module in MODULES]
    run(["tar", "-C", work, "-xJf", work / "usr/src" / f"{tree}.tar.xz", *folders], log=log)
    for patch in PATCHES:
        patch.apply(work / tree)

    # The packaged Makefile includes its other half by absolute path.
    makefile = work / "usr/src" / headers / "Makefile"
    makefile.write_text(makefile.read_text().replace("/usr/src/", f"{work}/usr/src/"))
    for module in MODULES:
        run(
            ["make", "-j", "2", "-C", makefile.parent, f"M={work / tree / module.source}", module.config, "modules"],
            log=log,
        )
    shutil.copytree(DCBSIM, work / DCBSIM.name)
    run(["make", "-C", makefile.parent, f"M={work / DCBSIM.name}", "modules"], log=log)
    built = [ko for folder in (*folders, DCBSIM.name) for ko in sorted((work / folder).glob("*.ko"))]
    for ko in built:
        run(["strip", "--strip-debug", ko], log=log)
    return built
