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


# QEMU's card never reports that its NVM is read (EEMNGCTL.CFG_DONE; hw/net/igb_core.c leaves it 0), so each reset waits for
# it in vain for 100 ticks: 0.4 s, three times when VFs are made. A real card reports it at once.
IGB_TIMEOUT = Patch(
    "drivers/net/ethernet/intel/igb/e1000_82575.c", "\ts32 timeout = PHY_CFG_TIMEOUT;\n", "\ts32 timeout = 1;\n"
)


RXE = "drivers/infiniband/sw/rxe"


def rxe_as_a_card(tree: Path) -> list[Patch]:
    """What makes rxe behave as the RDMA device of a card does.

    It is below the PCI function, where device plugins look. The rxe of backports (rxe_ns.c) works in other network namespaces
    than the host's, too. As a card's device does, it then takes the packets of a macvlan above its netdev, and it stays
    when its netdev goes to another namespace (the netdev is not being unregistered then, as its reg_state says). For both,
    rxe needs a socket in the namespace of the pod, so each namespace gets one. When the device goes there, too, its general
    services queue pair (QP1, which the connection manager uses) is made anew, so rxe forgets the former one.
    """
    verbs, net = f"{RXE}/rxe_verbs.c", f"{RXE}/rxe_net.c"
    # Since Linux 6.12 rxe keeps no pointer to its netdev, and this function gets it.
    netdev = "ndev" if "struct net_device *ndev)" in (tree / verbs).read_text() else "rxe->ndev"
    register = "\terr = ib_register_device(dev, ibdev_name, NULL);\n"
    parent = Patch(verbs, register, f"\tdev->dev.parent = {netdev}->dev.parent;\n{register}")
    namespaces = f"{RXE}/rxe_ns.c"
    if not (tree / namespaces).exists():
        return [parent]
    vlan = "\t\trxe = rxe_get_dev_from_net(vlan_dev_real_dev(ndev));\n"
    macvlan = "\tif (!rxe && netif_is_macvlan(ndev))\n\t\trxe = rxe_get_dev_from_net(macvlan_dev_real_dev(ndev));\n"
    header = "#include <linux/if_vlan.h>\n"
    gone = "\tcase NETDEV_UNREGISTER:\n"
    first = "int rxe_register_notifier(void)\n"
    sockets = "int rxe_ns_sockets(struct net *net)"
    init = "static int rxe_ns_init(struct net *net)\n"
    cleanup = "\t/* In the function timer_setup, .function is initialized. If .function\n"
    forget = "\tif (qp_type(qp) == IB_QPT_GSI)\n\t\tto_rdev(qp->ibqp.device)->port.qp_gsi_index = 0;\n"
    body = "{\n\treturn rxe_net_ipv4_init(net) ? : rxe_net_ipv6_init(net);\n}\n"
    return [
        parent,
        Patch(net, header, f"{header}#include <linux/if_macvlan.h>\n"),
        Patch(net, vlan, vlan + macvlan),
        Patch(net, gone, f"{gone}\t\tif (ndev->reg_state == NETREG_REGISTERED)\n\t\t\tbreak;\n"),
        Patch(net, first, f"{sockets};\n{sockets}\n{body}\n{first}"),
        Patch(f"{RXE}/rxe_qp.c", cleanup, forget + cleanup),
        Patch(namespaces, init, f"{sockets};\n{init}"),
        Patch(namespaces, "\treturn 0;\n", "\treturn rxe_ns_sockets(net);\n"),
    ]


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
    for patch in (*rxe_as_a_card(work / tree), IGB_TIMEOUT):
        patch.apply(work / tree)
    shutil.copytree(DCBSIM, work / DCBSIM.name)
    options = {folder: [module.config] for folder, module in zip(folders, MODULES, strict=True)} | {DCBSIM.name: []}
    # objtool reads /proc/self/limits since Linux 7.0. The mount ends with its namespace.
    enter = ("unshare", "--mount", "--pid", "--fork", "--kill-child", f"--root={workshop}", "--mount-proc")
    for folder, config in options.items():
        headers = f"/usr/src/linux-headers-{release}"
        run([*enter, "make", "-j", "2", "-C", headers, f"M=/build/{folder}", *config, "modules"], log=log)
    built = [ko for folder in options for ko in sorted((work / folder).glob("*.ko"))]
    for ko in built:
        run(["strip", "--strip-debug", ko], log=log)
    return built
