import pytest

from tasks.host import kernel
from tasks.host.kernel import NextKernel
from tasks.packages import dnf_install
from tasks.packages.holds import HeldPackages
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import DEBIAN, ROCKY_9, Answers, Node, files, of
from tests.deploy.systems import ALINUX, ROCKY_8, UBUNTU, dpkg, rpm

RUNNING = {"uname -r": "6.1.0-9-amd64", of(NodeRebootRequests): ["boot-1"]}
RHEL_RUNNING = {"uname -r": "5.14.0-427.el9.x86_64", of(NodeRebootRequests): ["boot-1"]}
NEXT = of(NextKernel)


def test_the_headers_of_the_running_kernel_are_installed(node: Node) -> None:
    result = node.deploy(kernel.pin, {**DEBIAN, **RUNNING, **dpkg("linux-image-6.1.0-9-amd64")}, kernel={})
    [install] = result.commands["Kernel | Kernel and headers"]
    assert install.endswith(" linux-headers-6.1.0-9-amd64")
    assert result.commands["Kernel | Kernel of the next boot"] == []


def test_nothing_is_done_if_all_is_in_place(node: Node) -> None:
    have = dpkg("linux-image-6.1.0-9-amd64", "linux-headers-6.1.0-9-amd64", "linux-image-amd64")
    there = {**DEBIAN, **RUNNING, **have, of(HeldPackages): "linux-image-amd64", NEXT: "/boot/vmlinuz-6.1.0-9-amd64"}
    assert node.deploy(kernel.pin, there, kernel={"release": "6.1.0-9-amd64", "hold": True}).did_nothing


def test_another_release_is_installed_and_a_reboot_requested(node: Node) -> None:
    node.data = {"kernel": {"release": "6.1.0-10-amd64"}}
    before = {**DEBIAN, **RUNNING, **dpkg(), NEXT: "/boot/vmlinuz-6.1.0-9-amd64"}
    result = node.deploy(kernel.pin, before, {**before, NEXT: "/boot/vmlinuz-6.1.0-10-amd64"})
    assert not result.failed
    install, request = result.flat
    assert install.endswith(" linux-image-6.1.0-10-amd64 linux-headers-6.1.0-10-amd64")
    assert "'kernel 6.1.0-10-amd64 is" in request and " 6.1.0-9-amd64 runs'" in request


def test_a_newer_kernel_that_grub_would_boot_is_refused(node: Node) -> None:
    there = {**DEBIAN, **RUNNING, **dpkg(), NEXT: "/boot/vmlinuz-6.1.0-11-amd64"}
    result = node.deploy(kernel.pin, there, kernel={"release": "6.1.0-10-amd64"})
    assert result.failed
    assert "GRUB boots 6.1.0-11-amd64" in result.flat[-1] and "remove 6.1.0-11-amd64" in result.flat[-1]


def test_ubuntu_has_drivers_in_a_package_of_their_own(node: Node) -> None:
    node.data = {"kernel": {"release": "5.15.0-7-generic", "headers": False}}
    result = node.deploy(kernel.pin, {**UBUNTU, **RUNNING, **dpkg()})
    image, extra = result.flat[:2]
    assert image.endswith(" linux-image-5.15.0-7-generic")
    assert extra.endswith(" linux-modules-extra-5.15.0-7-generic")


def test_on_rhel_dnf_installs_and_locks_the_release(node: Node) -> None:
    have = rpm("kernel=5.14.0-427.el9", "kernel-core=5.14.0-427.el9", "kernel-headers=5")
    there = {**ROCKY_9, **RHEL_RUNNING, **have, NEXT: "/boot/vmlinuz-5.14.0-427.el9.x86_64"}
    result = node.deploy(kernel.pin, there, kernel={"release": "5.14.0-503.el9.x86_64", "hold": True})
    # What an earlier deploy has locked keeps no other release out.
    assert result.flat[0].endswith(
        " --disableplugin=versionlock kernel-5.14.0-503.el9 kernel-devel-5.14.0-503.el9 kernel-devel-matched-5.14.0-503.el9"
    )
    plugin, lock, boot = result.flat[1:4]
    assert plugin == str(dnf_install("python3-dnf-plugin-versionlock"))
    assert lock.endswith(" dnf versionlock add kernel kernel-core")
    assert boot == "grubby --set-default /boot/vmlinuz-5.14.0-503.el9.x86_64"
    assert "5.14.0-427.el9.x86_64 runs" in result.flat[4]


DNF5 = {**ROCKY_9, **RHEL_RUNNING, **rpm("kernel=6.12.4-200.fc41", "dnf5=5.2.10")}


def test_holds_of_dnf5_are_refused(node: Node) -> None:
    result = node.deploy(kernel.pin, DNF5, kernel={"headers": False, "hold": True})
    assert result.failed
    assert "refuse: dnf on this node is dnf5" in result.flat[-1]


@pytest.mark.parametrize(("name", "locked"), [("kernel", True), ("kernel-core", True), ("bash", False), (None, False)])
def test_on_dnf5_only_locks_of_the_kernel_that_there_are_cannot_be_removed(
    node: Node, name: str | None, locked: bool
) -> None:
    node.data = {"kernel": {"headers": False, "hold": False}}
    text = f'version = "1.0"\n\n[[packages]]\nname = "{name}"\n[[packages.conditions]]\nkey = "evr"\n'
    result = node.deploy(kernel.pin, {**DNF5, **files(**({kernel.DNF5_LOCKS: text} if name else {}))})
    assert result.failed is locked
    assert [f"`dnf versionlock delete {name}`" in command for command in result.flat] == [True] * locked


@pytest.mark.parametrize(
    ("distribution", "release", "name", "version", "matched"),
    [
        (ROCKY_9, "5.14.0-427.el9.aarch64+64k", "kernel-64k", "5.14.0-427.el9", True),
        (ROCKY_9, "5.15.0-300.1.el9uek.x86_64", "kernel-uek", "5.15.0-300.1.el9uek", False),
        pytest.param(
            *(ROCKY_9, "5.14.0-162.23.1.rt21.186.el9_1.x86_64", "kernel-rt", "5.14.0-162.23.1.rt21.186.el9_1", False),
            id="legacy-rocm-build-2017",
        ),
        (ROCKY_8, "4.18.0-553.el8_10.x86_64", "kernel", "4.18.0-553.el8_10", False),
        (ALINUX, "5.10.134-16.3.al8.x86_64", "kernel", "5.10.134-16.3.al8", False),
    ],
)
def test_rhel_s_kernels_of_other_names(
    node: Node, distribution: Answers, release: str, name: str, version: str, matched: bool
) -> None:
    result = node.deploy(kernel.pin, {**distribution, **RHEL_RUNNING, **rpm()}, kernel={"release": release})
    wanted = [f"{name}{part}-{version}" for part in ("", "-devel", "-devel-matched")[: 3 if matched else 2]]
    assert result.flat[0].endswith(f" --disableplugin=versionlock {' '.join(wanted)}")


@pytest.mark.parametrize(
    ("have", "wanted"),
    [
        ([], ["kernel-devel-matched-5.14.0-427.el9"]),
        # EPEL's dkms requires it in any version, so dnf would bring the newest, and with that the newest kernel-core.
        pytest.param(
            ["dkms=3.4.1-1.el9", "kernel-devel-matched=5.14.0-400.el9"],
            ["kernel-devel-matched-5.14.0-427.el9"],
            id="secureblue-2450",
        ),
        (["dkms=3.4.1-1.el9", "kernel-devel-matched=5.14.0-427.el9"], []),
        (["dkms=3.0.0-1.el9"], []),
    ],
)
def test_dkms_brings_no_newer_kernel(node: Node, have: list[str], wanted: list[str]) -> None:
    node.data = {"kernel": {}, "gpu_driver": {"version": "580.95.05"}}
    result = node.deploy(kernel.pin, {**ROCKY_9, **RHEL_RUNNING, **rpm("kernel-devel=5.14.0-427.el9", *have)})
    assert [command.split()[-1] for command in result.flat] == wanted


HEADERS = ["kernel-devel-5.14.0-427.el9 kernel-devel-matched-5.14.0-427.el9"]


@pytest.mark.parametrize(
    ("have", "wanted"),
    [
        (["kernel-devel=5.14.0-427.el9"], []),
        ([], HEADERS),
        pytest.param(["kernel-devel=5.14.0-503.el9"], HEADERS, id="ansible-role-nvidia-driver-18"),
        # An update has brought another kernel, and the node has not booted it yet.
        (["kernel-devel=5.14.0-427.el9", "dkms=3.4.1-1.el9", "kernel-devel-matched=5.14.0-503.11.1.el9_5"], []),
    ],
)
def test_a_node_with_the_headers_needs_no_other_package_of_an_old_kernel_without_a_reason(
    node: Node, have: list[str], wanted: list[str]
) -> None:
    """The repositories may have no packages of the running kernel any more."""
    result = node.deploy(kernel.pin, {**ROCKY_9, **RHEL_RUNNING, **rpm(*have)}, kernel={})
    assert [command.rpartition("versionlock ")[2] for command in result.flat] == wanted


def test_an_update_does_not_fail_at_a_held_kernel(node: Node) -> None:
    """kernel-devel-matched requires a kernel-core of its version."""
    node.data = {"kernel": {"headers": False, "hold": True}}
    have = rpm("kernel-core=5.14.0-427.el9", "kernel-devel-matched=5.14.0-427.el9", "kernel-rt-core=5.14.0-427.el9")
    *_, lock = node.deploy(kernel.pin, {**ROCKY_9, **RHEL_RUNNING, **have}).flat
    assert lock.endswith(" dnf versionlock add kernel-core kernel-devel-matched kernel-rt-core")


@pytest.mark.parametrize(
    ("held", "on_hold", "done"),
    [
        (True, [], ["apt-mark hold linux-headers-amd64 linux-image-amd64"]),
        (True, ["linux-image-amd64"], ["apt-mark hold linux-headers-amd64"]),
        (False, ["linux-image-amd64"], ["apt-mark unhold linux-image-amd64"]),
        (False, [], []),
    ],
)
def test_packages_are_held_and_released_as_the_key_says(
    node: Node, held: bool, on_hold: list[str], done: list[str]
) -> None:
    node.data = {"kernel": {"hold": held, "headers": False}}
    have = dpkg("linux-image-amd64", "linux-headers-amd64", "linux-image-6.1.0-9-amd64", "linux-libc-dev", "linux-base")
    ran = node.deploy(kernel.pin, {**DEBIAN, **RUNNING, **have, of(HeldPackages): on_hold}).flat
    assert len(ran) == len(done)
    assert all(command.endswith(end) for command, end in zip(ran, done, strict=True))


def test_ubuntus_signed_modules_of_nvidia_bring_no_newer_kernel(node: Node) -> None:
    node.data = {"kernel": {"hold": True, "headers": False}}
    signed = "linux-modules-nvidia-580-server-open"
    have = dpkg(f"{signed}-generic-hwe-24.04", f"{signed}-6.8.0-60-generic", "linux-modules-6.8.0-60-generic")
    [hold] = node.deploy(kernel.pin, {**UBUNTU, **RUNNING, **have, of(HeldPackages): []}).flat
    assert hold.endswith(f" apt-mark hold {signed}-generic-hwe-24.04")
