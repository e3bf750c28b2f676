"""Public reports of kernels: which packages they have, and which of them a boot takes."""

from pathlib import Path

import pytest

from tasks import reboot_policy
from tasks.common.commands import script
from tasks.host import kernel
from tasks.host.kernel import NextKernel, NoInitramfs
from tasks.packages import AvailableVersions, vendor_repository
from tasks.packages.holds import HeldPackages
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import DEBIAN, ROCKY_9, Node, of
from tests.deploy.host.test_kernel import RUNNING
from tests.deploy.scripts import sh
from tests.deploy.systems import UBUNTU, dpkg, rpm
from tests.stand_ins import program, text_file


@pytest.mark.parametrize(
    ("release", "separate"),
    [
        pytest.param("6.14.0-1015-nvidia-64k", False, id="nv-kernels-191"),
        pytest.param("6.8.0-1040-nvidia", False, id="nv-kernels-201"),
        pytest.param("6.16.0-16-generic", False, id="kairos-3610"),
        pytest.param("7.0.0-14-generic", False, id="emba-2057"),
        pytest.param("5.15.0-1042-azure", True, id="runner-images-7587"),
    ],
)
def test_a_kernel_has_its_drivers_in_a_package_of_their_own_or_not(node: Node, release: str, separate: bool) -> None:
    node.data = {"kernel": {"release": release}}
    names = ["modules", "modules-extra"] if separate else ["modules"]
    versions = [f" linux-{each}-{release} | 1 | https://example.com noble/main amd64 Packages" for each in names]
    result = node.deploy(kernel.pin, {**UBUNTU, **RUNNING, **dpkg(), of(AvailableVersions): versions})
    assert result.flat[0].endswith(f" linux-image-{release} linux-headers-{release}")
    assert any("modules-extra" in command for command in result.flat) is separate


PVE = "6.14.11-2-pve"


@pytest.mark.parametrize(
    ("there", "release", "image"),
    [
        pytest.param(["proxmox-default-kernel"], None, "", id="gasket-dkms-20"),
        pytest.param(["proxmox-kernel-6.14", "proxmox-default-headers"], None, "", id="edgetpu-723"),
        pytest.param([], None, "", id="ugreen_leds_controller-42"),
        pytest.param([], PVE, f"proxmox-kernel-{PVE}-signed ", id="i915-sriov-dkms-403"),
        ([f"proxmox-kernel-{PVE}"], PVE, ""),
    ],
)
def test_the_packages_of_proxmox_s_kernels_have_names_of_their_own(
    node: Node, there: list[str], release: str | None, image: str
) -> None:
    have = {**dpkg(*there), "uname -r": PVE, of(HeldPackages): []}
    result = node.deploy(kernel.pin, {**DEBIAN, **RUNNING, **have}, kernel={"release": release, "hold": True})
    assert result.flat[0].endswith(f" {image}proxmox-headers-{PVE}")
    metas = sorted(each for each in there if not each.endswith("-pve"))
    assert [command.endswith(f" apt-mark hold {' '.join(metas)}") for command in result.flat[1:]] == [True] * bool(
        metas
    )


LT = {of(AvailableVersions): "kernel-lt-core 6.12.9"}


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        pytest.param(["kernel-ml-core=6.12.9-1.el9.elrepo"], "kernel-ml", id="rtl8723de-23"),
        pytest.param(["kernel-lt-core=6.12.9-1.el9.elrepo"], "kernel-lt", id="rtlwifi_new-375"),
        pytest.param([], "kernel-lt", id="neither is installed"),
    ],
)
def test_the_headers_of_elrepo_s_kernels_have_a_name_of_their_own(node: Node, there: list[str], wanted: str) -> None:
    running = {**RUNNING, "uname -r": "6.12.9-1.el9.elrepo.x86_64", **LT}
    node.data = {"kernel": {"hold": True}}
    result = node.deploy(kernel.pin, {**ROCKY_9, **running, **rpm("python3-dnf-plugin-versionlock=4.3-1", *there)})
    assert result.flat[0].endswith(f" --disableplugin=versionlock {wanted}-devel-6.12.9-1.el9.elrepo")
    # An update must not bring another kernel.
    assert [command.endswith(f" add {wanted}-core") for command in result.flat[1:]] == [True] * len(there)


@pytest.mark.parametrize(
    ("running", "release", "there", "more"),
    [
        pytest.param(
            "6.12.0-124.52.2.el10_1.x86_64", "6.12.0-124.55.1.el10_1.x86_64", "kernel-modules-extra",
            "kernel-modules-extra-6.12.0-124.55.1.el10_1", id="k3s-ansible-536",
        ),
        pytest.param(
            "6.12.0-211.26.1.el10_2.x86_64", "6.12.0-211.30.1.el10_2.x86_64", "kernel-modules-extra",
            "kernel-modules-extra-6.12.0-211.30.1.el10_2", id="kops-18724",
        ),
        (
            "6.12.0-100.28.2.el10uek.x86_64", "6.12.0-105.51.5.el10uek.x86_64", "kernel-uek-modules-extra",
            "kernel-uek-modules-extra-6.12.0-105.51.5.el10uek",
        ),
        ("6.12.0-124.52.2.el10_1.x86_64", "6.12.0-124.55.1.el10_1.x86_64", "kernel-uek-modules-extra", ""),
    ],
)  # fmt: skip
def test_a_node_keeps_its_extra_modules_with_another_kernel(
    node: Node, running: str, release: str, there: str, more: str
) -> None:
    """On RHEL 10 br_netfilter is one of them. An update of the distribution would bring them along."""
    node.data = {"kernel": {"release": release, "headers": False}}
    have = {**ROCKY_9, **RUNNING, "uname -r": running, **rpm(f"{there}=1-1")}
    names = node.deploy(kernel.pin, have).flat[0].partition(" --disableplugin=versionlock ")[2].split()
    assert names[1:] == [more] * bool(more)


NEWEST, RECOVERY, OLD = "6.11.0-9-aws", "6.11.0-9-aws (recovery mode)", "6.8.0-1008-aws"
ENTRY = """\
menuentry '{title}' --class gnu-linux --class os $menuentry_id_option '{id}' {{
	recordfail
	if [ x$grub_platform = xxen ]; then insmod xzio; fi
	linux	/boot/vmlinuz-{release} root=UUID=0ef3 ro
	initrd	/boot/initrd.img-{release}
}}
"""


def menu(default: str) -> str:
    """As update-grub of Ubuntu makes it, in short."""
    header = (
        f'if [ "${{next_entry}}" ] ; then\n   set default="${{next_entry}}"\nelse\n   set default="{default}"\nfi\n'
    )
    titles = {f"Ubuntu, with Linux {each}": each for each in (NEWEST, RECOVERY, OLD)}
    entries = [
        ENTRY.format(title=title, id=f"gnulinux-{each}-advanced-0ef3", release=each.partition(" ")[0])
        for title, each in titles.items()
    ]
    first = ENTRY.format(title="Ubuntu", id="gnulinux-simple-0ef3", release=NEWEST)
    submenu = "submenu 'Advanced options for Ubuntu' $menuentry_id_option 'gnulinux-advanced-0ef3' {\n"
    return f"{header}function recordfail {{\n  set recordfail=1\n}}\n{first}{submenu}{''.join(entries)}}}\n"


ADVANCED = f"Advanced options for Ubuntu>Ubuntu, with Linux {OLD}"


@pytest.mark.parametrize(
    ("default", "environment", "booted"),
    [
        pytest.param(f"gnulinux-advanced-0ef3>gnulinux-{OLD}-advanced-0ef3", "", OLD, id="hami-website-737"),
        pytest.param(ADVANCED, "", OLD, id="legacy-rocm-build-150"),
        pytest.param("1>2", "", OLD, id="rtxi-89"),
        pytest.param("${saved_entry}", f"saved_entry={ADVANCED}\n", OLD, id="qubes-issues-7467"),
        pytest.param("0", f"next_entry={ADVANCED}\n", OLD, id="petitboot-24"),
        pytest.param("0", "", NEWEST, id="securedrop-913"),
        pytest.param(
            "Advanced options for Ubuntu>Ubuntu, with Linux 6.5.0-1-aws", "", NEWEST, id="an entry that is gone"
        ),
    ],
)
def test_the_kernel_that_grub_boots_is_the_one_of_its_menu_s_default(
    tmp_path: Path, default: str, environment: str, booted: str
) -> None:
    folder = tmp_path / "boot/grub"
    text_file(folder / "grub.cfg", menu(default))
    (folder / "grubenv").write_text(f"# GRUB Environment Block\n{environment}")
    assert NextKernel().process(sh(kernel._NEXT, tmp_path)) == booted


ROCKY_NEXT, DEBIAN_NEXT = "5.14.0-503.el9.x86_64", "6.1.0-10-amd64"


@pytest.mark.parametrize(
    ("release", "files", "refused"),
    [
        pytest.param(
            ROCKY_NEXT, [f"initramfs-{OLD}.img", f"vmlinuz-{ROCKY_NEXT}", f"initramfs-{ROCKY_NEXT}kdump.img"], True,
            id="spel-795",
        ),
        pytest.param(
            DEBIAN_NEXT, [f"initrd.img-{OLD}", f"vmlinuz-{DEBIAN_NEXT}", f"initrd.img-{DEBIAN_NEXT}.dpkg-bak"], True,
            id="deepin-2123",
        ),
        (ROCKY_NEXT, [f"initramfs-{OLD}.img", f"vmlinuz-{ROCKY_NEXT}", f"initramfs-{ROCKY_NEXT}.img"], False),
        pytest.param(
            DEBIAN_NEXT, [f"initrd.img-{OLD}", f"vmlinuz-{DEBIAN_NEXT}", f"initrd.img-{DEBIAN_NEXT}=cut"], True,
            id="qubes-issues-5038",
        ),
        pytest.param(
            DEBIAN_NEXT, [f"initrd.img-{OLD}=odd", f"vmlinuz-{DEBIAN_NEXT}", f"initrd.img-{DEBIAN_NEXT}=odd"], False,
            id="no initramfs can be listed",
        ),
        (DEBIAN_NEXT, [f"initrd.img-{OLD}", f"vmlinuz-{DEBIAN_NEXT}", f"initrd.img-{DEBIAN_NEXT}"], False),
        pytest.param(DEBIAN_NEXT, [f"vmlinuz-{DEBIAN_NEXT}"], False, id="the running one has none either"),
        pytest.param(DEBIAN_NEXT, [f"initrd.img-{OLD}"], False, id="kernels are elsewhere"),
    ],
)  # fmt: skip
def test_a_host_is_not_rebooted_into_a_kernel_without_an_initramfs(
    node: Node, tmp_path: Path, release: str, files: list[str], refused: bool
) -> None:
    """dnf ends with 0 although none was made, and GRUB's menu has the kernel. Whatever wants the reboot, it is refused."""
    (tmp_path / "boot").mkdir()
    for name, _, text in (each.partition("=") for each in files):
        (tmp_path / "boot" / name).write_text(text or "image")
    program(tmp_path / "bin/lsinitramfs", 'grep image "$1"')
    absent = {of(NoInitramfs): sh(kernel._NO_INITRAMFS, tmp_path, OLD, release, programs=tmp_path / "bin")}
    have = {**RUNNING, **absent, of(NextKernel): f"/boot/vmlinuz-{release}", "cat /proc/sys/kernel/random": ["boot-2"]}
    due = {of(NodeRebootRequests): ["boot-1", "boot boot-1 why "]}
    rebooted = node.deploy(reboot_policy.by_policy, {**have, **due}, reboot={"policy": "allow"})
    assert (str(script(reboot_policy._REBOOT)) in rebooted.flat) is not refused
    node.data = {"kernel": {"release": release, "headers": False}}
    pinned = node.deploy(kernel.pin, {**DEBIAN, **have, **dpkg(f"linux-image-{release}")})
    for each in (rebooted, pinned):
        assert any(f"kernel {release} has no complete initramfs, so" in line for line in each.errors) is refused


FULL = """\
Setting up linux-image-5.15.0-75-generic (5.15.0-75.82) ...
update-initramfs: Generating /boot/initrd.img-5.15.0-75-generic
zstd: error 25 : Write error : No space left on device (cannot write compressed block)
E: Sub-process /usr/bin/dpkg returned an error code (1)
"""
DF = """\
Filesystem     1024-blocks      Used Available Capacity Mounted on
/dev/vda2        102400000  12400000  90000000      13% /
/dev/vda1           496000    478592     17408      97% /boot
/dev/vda2        102400000  12400000  90000000      13% /
"""


@pytest.mark.parametrize("script", [pytest.param(vendor_repository._APT, id="apt"), vendor_repository._DNF])
def test_a_full_boot_is_named_if_a_kernel_cannot_be_installed(tmp_path: Path, script: str) -> None:
    for name in ("apt-get", "dnf"):
        program(tmp_path / name, f"cat >&2 <<'END'\n{FULL}END\n[ \"$*\" = '-q update' ] || exit 1")
    program(tmp_path / "df", f"cat <<'END'\n{DF}END")
    with pytest.raises(AssertionError) as caught:
        sh(script, "", "another release", "", "linux-image-5.15.0-75-generic", programs=tmp_path, MACHINE=str(tmp_path))
    assert [line for line in str(caught.value).splitlines() if "MiB left" in line] == [
        "/boot has 17 MiB left, which may be the cause (df)"
    ]
