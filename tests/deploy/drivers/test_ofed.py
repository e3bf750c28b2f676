import hashlib
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from pyinfra.api.exceptions import DeployError

from tasks import reboot
from tasks.drivers import ofed
from tasks.drivers.ofed import RdmaModules, doca, mlnx_ofed, modules
from tasks.drivers.ofed.doca import KernelHeaders, LeftBehind
from tasks.drivers.ofed.mlnx_ofed import InstalledBundle
from tasks.drivers.ofed.modules import ModuleHolders, OfedStack, OldInitramfs
from tasks.drivers.ofed.users import OfedUsers
from tasks.packages import DISTRIBUTIONS, Family, OperatingSystem, dnf_install, holds
from tasks.packages.dkms import Builds, Module
from tasks.packages.holds import HeldPackages
from tasks.packages.vendor_repository import KeyFingerprints
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import DEBIAN, ROCKY_9, SIGNATURES, Answers, Node, OwnConnector, file_answers, of
from tests.deploy.packages.test_packages import install
from tests.deploy.scripts import sh
from tests.deploy.systems import dpkg, release, rpm

KERNEL = "6.1.0-9-amd64"
FINGERPRINT = "83DB6997E7844970861FCB6BEA39500F9B4DFB6F"
STACK, USERS, HOLDERS, OLD_INITRAMFS = of(OfedStack), of(OfedUsers), of(ModuleHolders), of(OldInitramfs)
REQUESTS, BUILDS, RELOAD = of(NodeRebootRequests), of(Builds), "openibd restart"
HEADERS, RDMA, BUNDLE = of(KernelHeaders), of(RdmaModules), of(InstalledBundle)
UNAME = {"uname -r": KERNEL}
BOOT = "00000000-0000-4000-8000-00000000000"
NO_REQUEST = {REQUESTS: [f"{BOOT}1"]}
DEBS = ("gpg", *ofed.INBOX["debian"])
OPS = "OFED | "


def stack(loaded: str = "AB", installed: str = "AB", path: str = "/lib/modules/K/updates/dkms/rdma_rxe.ko") -> Answers:
    lines = ["dkms mlnx-ofed-kernel", "built rdma_rxe", "module rdma_rxe", f"path {path}", f"installed {installed}"]
    return {STACK: [f"kernel {KERNEL}", *lines, f"loaded {loaded}"]}


BUILT = {BUILDS: f"mlnx-ofed-kernel/25.10, {KERNEL}, x86_64: installed"}
NO_STACK = {STACK: [f"kernel {KERNEL}"]}


def on(mine: Answers, system: Answers = DEBIAN, machine: str = "x86_64") -> Answers:
    """A test's own answers, and then those of a node without OFED."""
    others: Answers = {**dpkg(*DEBS), **rpm("gnupg2"), HEADERS: "yes", **NO_REQUEST, "uname -m": machine, **UNAME}
    return {**mine, **{fact: answer for fact, answer in {**system, **others}.items() if fact not in mine}}


def in_force() -> None:
    modules.load_installed(name="Loaded modules", task="ofed")


# What runs, and what is installed


def test_modules_in_use_are_not_reloaded_and_a_reboot_is_requested(node: Node) -> None:
    users = {USERS: ["ib_write_bw (pid 7) has uverbs0 open", "a route goes through ens1f0"]}
    result = node.deploy(in_force, {**stack(loaded="CD"), **users, **NO_REQUEST})
    [request] = result.flat
    assert f" sh {reboot.FOLDER} ofed " in request and request.endswith(": rdma_rxe (AB)'")
    named = "not reloaded now: ib_write_bw (pid 7) has uverbs0 open; a route goes through ens1f0"
    assert any(named in line for line in result.log)


@pytest.mark.parametrize("users", [[], ["ens1f0 has the management address"]])
def test_modules_that_the_kernel_would_refuse_are_neither_loaded_nor_waited_for(node: Node, users: list[str]) -> None:
    refused = {SIGNATURES: ["rdma_rxe.ko: the key mok.pub is not enrolled"]}
    result = node.deploy(in_force, {**stack(loaded="CD"), USERS: users, **NO_REQUEST, **refused})
    refusal = result.refusal
    assert "ofed: with Secure Boot" in refusal and "rdma_rxe.ko: the key mok.pub" in refusal
    assert any("/lib/modules/K/updates/dkms/rdma_rxe.ko" in command for command in result.ran if SIGNATURES in command)


@pytest.mark.parametrize(
    ("boot", "loaded", "done"),
    [("1", "CD", []), ("0", "AB", [f"rm -f {reboot.FOLDER}/ofed"])],
    ids=["due", "satisfied"],
)
def test_a_reboot_is_requested_once_and_until_it_has_loaded_the_modules(
    node: Node, boot: str, loaded: str, done: list[str]
) -> None:
    made = {REQUESTS: [f"{BOOT}1", f"ofed {BOOT}{boot} installed modules are not the loaded ones: rdma_rxe (AB)"]}
    assert node.deploy(in_force, {**stack(loaded), USERS: ["x"], **made}).flat == done


def test_an_initramfs_with_the_old_module_is_made_again_before_the_reboot(node: Node) -> None:
    answers = {**stack(loaded="CD"), USERS: ["x"], OLD_INITRAMFS: "rdma_rxe", **NO_REQUEST}
    assert "update-initramfs" in node.deploy(in_force, answers).flat[0]


def test_modules_that_do_not_unload_request_a_reboot_and_name_their_holders(node: Node) -> None:
    answers = {**stack(loaded="CD"), USERS: [], HOLDERS: "mlx_compat is held by nvme", **NO_REQUEST}
    result = node.deploy(in_force, answers)
    assert RELOAD in result.flat[0]
    assert " ofed " in result.flat[1]
    assert any("remove its package (mlnx-nvme-dkms)" in line for line in result.log)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (NO_STACK, "have no modules for the running kernel"),
        (stack(path="/lib/modules/K/kernel/rdma_rxe.ko"), "the kernel's own modules instead of OFED's: rdma_rxe"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(node: Node, answers: Answers, message: str) -> None:
    assert message in node.deploy(in_force, answers).refusal


def test_modules_not_loaded_after_openibd_s_restart_fail_the_host(node: Node) -> None:
    # The fake gives the same answers in both phases, so a stack without the module stands for the second reading.
    before = modules.Stack(KERNEL, True, 1, (Module("rdma_rxe", "/updates/x.ko", "AB", "CD", 0),))
    after = modules.Stack(KERNEL, True, 1, ())
    assert modules.not_loaded_again(before, after) == ["rdma_rxe"]
    assert modules.not_loaded_again(before, before) == []


def test_modules_without_a_srcversion_are_compared_by_build_id(node: Node) -> None:
    answers = {**stack("", ""), USERS: [], **NO_REQUEST}
    assert RELOAD in node.deploy(in_force, {**answers, STACK: [*answers[STACK], "other"]}).flat[0]
    assert node.deploy(in_force, {**answers, STACK: [*answers[STACK], "same"]}).flat == []


def test_modules_that_dkms_has_not_built_yet_are_built_in_order(node: Node) -> None:
    known = ["iser/25.10, 6.1.0-8-amd64, x86_64: installed", "mlnx-ofed-kernel/25.10: added", "erdma/1.0: added"]
    result = node.deploy(lambda: modules.build(name="built"), {BUILDS: known, **UNAME})
    built = [command.rpartition(" sh ")[2] for command in result.flat]
    assert built == [f"mlnx-ofed-kernel 25.10 {KERNEL}", f"iser 25.10 {KERNEL}"]


# inbox


def test_inbox_installs_what_is_missing(node: Node) -> None:
    node.data = {"ofed": {"inbox": {}}}
    result = node.deploy(ofed.install, {**DEBIAN, **NO_STACK, **dpkg(*DEBS[:3]), RDMA: "yes"})
    assert result.flat == [install("ibverbs-utils", "rdmacm-utils", "infiniband-diags", "perftest")]
    again = node.deploy(ofed.install, {**DEBIAN, **NO_STACK, **dpkg(*DEBS), RDMA: "yes"})
    assert again.planned == {f"{OPS}Inbox": False}
    assert again.flat == []


def test_inbox_installs_the_modules_that_a_small_kernel_lacks(node: Node) -> None:
    node.data = {"ofed": {"inbox": {}}}
    answers = {**NO_STACK, **UNAME}
    on_rocky = {**answers, **ROCKY_9, **rpm(*ofed.INBOX["rhel"])}
    assert node.deploy(ofed.install, on_rocky).flat == [str(dnf_install(f"kernel-modules-{KERNEL}"))]
    grace = {**on_rocky, "uname -r": "5.14.0-427.el9.aarch64+64k"}
    assert node.deploy(ofed.install, grace).flat == [str(dnf_install("kernel-64k-modules-5.14.0-427.el9"))]
    result = node.deploy(ofed.install, {**answers, **DEBIAN, **dpkg(*DEBS)})
    assert f"the kernel {KERNEL} has no RDMA modules" in result.flat[0]
    assert result.failed


def test_inbox_waits_for_the_kernel_that_has_the_modules(node: Node) -> None:
    result = node.deploy(ofed.install, on(NO_STACK), ofed={"inbox": {}}, kernel={"release": "6.1.0-99-amd64"})
    assert not result.failed
    assert result.flat == []


def test_inbox_is_refused_if_a_vendors_ofed_is_installed(node: Node) -> None:
    assert "ofed_uninstall.sh" in node.deploy(ofed.install, on({**stack(), RDMA: "yes"}), ofed={"inbox": {}}).refusal


# doca

DOCA: dict[str, Any] = {"version": "3.2.1-044501", "fingerprint": FINGERPRINT}
SOURCE = """\
# Written by Trackbed; changes here are overwritten.
Types: deb
URIs: https://linux.mellanox.com/public/repo/doca/3.2.1/debian12/x86_64/
Suites: ./
Signed-By: /etc/apt/keyrings/trackbed-doca.gpg
"""


def test_a_fresh_debian_gets_docas_repository_and_packages(node: Node) -> None:
    result = node.deploy(ofed.install, on({**NO_STACK, BUILDS: []}), ofed={"doca": DOCA})
    [key] = result.commands[f"{OPS}doca: key of its repository"]
    assert f" sh {doca.NVIDIA}/GPG-KEY-Mellanox.pub {FINGERPRINT} /etc/apt/keyrings/trackbed-doca.gpg" in key
    assert result.uploads["/etc/apt/sources.list.d/trackbed-doca.sources"].decode() == SOURCE
    assert result.uploads[doca.PREFERENCES].decode() == doca.PREFERRED
    install, hold = result.commands[f"{OPS}DOCA-OFED"]
    assert " sh mlnx-ofed-kernel " in install
    assert install.endswith(" doca-ofed=3.2.1-044501")
    assert hold.endswith("apt-mark hold doca-ofed")
    # The distribution's, that the deploy has found, are replaced.
    assert " '' '' rdma-core ibverbs-providers " in result.commands[f"{OPS}The vendor's rdma-core"][0]


DOCA_IN_PLACE = on(
    {
        **stack(),
        **BUILT,
        **dpkg(*DEBS, "doca-ofed=3.2.1-044501", "rdma-core=2510mlnx58-1"),
        **{of(KeyFingerprints): FINGERPRINT, of(HeldPackages): "doca-ofed"},
        **file_answers("/etc/apt/sources.list.d/trackbed-doca.sources", SOURCE),
        **file_answers(doca.PREFERENCES, doca.PREFERRED),
    }
)


def test_nothing_is_done_if_doca_is_in_place(node: Node) -> None:
    assert node.deploy(ofed.install, DOCA_IN_PLACE, ofed={"doca": DOCA}).did_nothing


def test_what_a_newer_release_of_doca_has_left_goes_back_before_the_modules_are_judged(node: Node) -> None:
    left = {of(LeftBehind): ["mlnx-ofed-kernel-dkms=25.10.1", "ofed-scripts=25.10.1"]}
    result = node.deploy(ofed.install, {**left, **DOCA_IN_PLACE}, ofed={"doca": DOCA})
    [install] = result.flat
    assert install.endswith(" mlnx-ofed-kernel-dkms=25.10.1 ofed-scripts=25.10.1")
    assert "--allow-downgrades" in install
    names = list(result.planned)
    assert names.index(f"{OPS}Packages of the same release") < names.index(f"{OPS}Loaded modules")
    asked = next(command for command in result.ran if of(LeftBehind) in command)
    assert " https://linux.mellanox.com/public/repo/doca/3.2.1/debian12/x86_64/ " in asked


def test_a_fresh_rocky_9_gets_docas_repository_and_packages(node: Node) -> None:
    node.data = {"ofed": {"doca": {**DOCA, "profile": "doca-roce"}}}
    result = node.deploy(ofed.install, on(NO_STACK, ROCKY_9, "aarch64"))
    source = result.uploads["/etc/yum.repos.d/trackbed-doca.repo"].decode()
    assert "baseurl=https://linux.mellanox.com/public/repo/doca/3.2.1/rhel9/arm64-sbsa/\n" in source
    [key] = result.commands[f"{OPS}doca: key of its repository"]
    assert f" sh https://www.mellanox.com/downloads/ofed/RPM-GPG-KEY-Mellanox-SHA256 {FINGERPRINT} " in key
    install, *hold = result.commands[f"{OPS}DOCA-OFED"]
    assert " sh mlnx-ofa_kernel " in install
    assert install.endswith(" doca-roce-3.2.1-044501")
    assert hold[-1].endswith("dnf versionlock add doca-roce-3.2.1-044501")


@pytest.mark.parametrize(
    ("current", "refused"), [("MLNX_OFED_LINUX-24.10-1.1.4.0:", True), ("OFED-internal-25.10-1.2.3:", False)]
)
def test_doca_is_refused_beside_mlnx_ofed_whoever_installed_it(node: Node, current: str, refused: bool) -> None:
    result = node.deploy(ofed.install, on({**stack(), **BUILT, BUNDLE: ["none", "none", current]}), ofed={"doca": DOCA})
    refusals = [command for command in result.flat if "ofed_uninstall.sh" in command]
    assert (len(refusals), result.uploads == {}) == (int(refused), refused)
    assert all("MLNX_OFED_LINUX-24.10-1.1.4.0 is installed" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("package", "refused"),
    [
        pytest.param("doca-ofed-userspace-3.4", True, id="ubuntu-server-documentation-720"),
        pytest.param("doca-ofed-userspace", False, id="nvidia"),
    ],
)
def test_doca_is_refused_beside_canonicals(node: Node, package: str, refused: bool) -> None:
    node.data = {"ofed": {"doca": DOCA}}
    result = node.deploy(ofed.install, on({**stack(), **BUILT, **dpkg(*DEBS, package), BUNDLE: ["none", "none"]}))
    refusals = result.commands[f"{OPS}No other OFED"]
    assert [f"is installed ({package}); drain the node" in each for each in refusals] == [True] * refused


def test_doca_without_kernel_headers_installs_nothing(node: Node) -> None:
    result = node.deploy(ofed.install, on({**NO_STACK, HEADERS: []}), ofed={"doca": DOCA})
    assert result.failed
    assert f"the headers of the running kernel {KERNEL} are missing" in result.commands[f"{OPS}Kernel headers"][0]
    assert result.commands[f"{OPS}DOCA-OFED"] == []


@pytest.mark.parametrize("source", ["doca", "mlnx_ofed"])
def test_the_kernel_that_is_to_run_is_waited_for(node: Node, given: dict[str, Any], source: str) -> None:
    """The running one has no headers, and the reboot comes after this."""
    node.data = {"ofed": {source: {"doca": DOCA, "mlnx_ofed": given}[source]}, "kernel": {"release": "6.1.0-99-amd64"}}
    result = node.deploy(ofed.install, on({**NO_STACK, BUILDS: [], HEADERS: []}))
    assert not result.failed
    waiting = ("Kernel headers", "DOCA-OFED", "The vendor's rdma-core", "MLNX_OFED", "Modules for the running kernel")
    for name in (*waiting, "Loaded modules"):
        assert result.commands.get(f"{OPS}{name}", []) == []


@pytest.mark.parametrize(
    ("identity", "version", "number", "folder"),
    [
        pytest.param("ubuntu", "26.04", "3.5.0", "ubuntu26.04", id="doca-driver-build-424"),
        pytest.param("rocky", "10.2", "3.2.3", "rhel10", id="stackhpc-kayobe-config-2430"),
    ],
)
def test_doca_is_known_for_new_releases(identity: str, version: str, number: str, folder: str) -> None:
    system = OperatingSystem(DISTRIBUTIONS[identity], identity, version)
    ofed._supported("doca", ofed.DOCA_ON, system)
    wanted = doca.Doca(version=f"{number}-1", fingerprint="0" * 40)
    assert doca.repository(wanted, system, "x86_64").uri == f"{doca.NVIDIA}/{number}/{folder}/x86_64/"


@pytest.mark.parametrize(
    ("system", "doca", "message"),
    [
        (("ubuntu", "23.10"), DOCA, "doca does not support Ubuntu 23.10; "),
        (("fedora", "41"), DOCA, "doca does not support Fedora 41"),
        (("ol", "9.4"), DOCA, "folder for Oracle Linux 9.4 is not known"),
        # Older folders have Debian's minor release in their names.
        (("debian", "12"), {**DOCA, "version": "3.1.0-091000"}, "folder for Debian 12 is not known"),
    ],
)
def test_a_distribution_that_doca_does_not_support_is_refused(
    node: Node, system: tuple[str, str], doca: dict[str, Any], message: str
) -> None:
    error = node.deploy(ofed.install, {**release(*system), "uname -m": "x86_64"}, ofed={"doca": doca}).refusal
    assert "@fake/node-a.ofed: " in error and message in error


# mlnx_ofed


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "MLNX_OFED_LINUX-24.10-1.1.4.0-debian12.5-x86_64.tgz"
    path.write_bytes(b"a bundle")
    return {"bundle": str(path), "sha256": hashlib.sha256(b"a bundle").hexdigest()}


def test_a_bundle_is_sent_and_installed_with_its_firmware_and_options_only_if_asked(
    node: Node, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the paths of other files on the control host, it may begin with ~.
    monkeypatch.setenv("HOME", str(Path(given["bundle"]).parent))
    node.data = {"ofed": {"mlnx_ofed": {**given, "bundle": f"~/{Path(given['bundle']).name}"}}}
    result = node.deploy(ofed.install, on({**NO_STACK, BUNDLE: ["none", "none"]}))
    made, upload, install = result.commands[f"{OPS}MLNX_OFED"]
    assert made.endswith(" sh /var/lib/trackbed/ofed")
    assert upload == "upload /var/lib/trackbed/ofed/bundle.tgz"
    said = f" sh {upload.split()[1]} {given['sha256']} {mlnx_ofed.FOLDER} {holds.PATH} --force"
    assert install.endswith(f"{said} --without-fw-update")
    node.data["ofed"]["mlnx_ofed"] |= {"firmware_update": True, "options": ["--add-kernel-support"]}
    result = node.deploy(ofed.install, on({**NO_STACK, BUNDLE: ["none", "none"]}))
    assert result.commands[f"{OPS}MLNX_OFED"][-1].endswith(f"{said} --add-kernel-support")


def test_a_bundle_of_the_rhel_family_is_held_by_dnf_s_version_locks(node: Node, given: dict[str, Any]) -> None:
    bundle = Path(given["bundle"])
    named = bundle.rename(bundle.with_name("MLNX_OFED_LINUX-24.10-1.1.4.0-rhel9.4-x86_64.tgz"))
    node.data = {"ofed": {"mlnx_ofed": {**given, "bundle": str(named)}}}
    answers = on({**NO_STACK, BUNDLE: ["none", "none"]}, ROCKY_9)
    plugin, _, _, install = node.deploy(ofed.install, answers).commands[f"{OPS}MLNX_OFED"]
    assert plugin == str(dnf_install("python3-dnf-plugin-versionlock"))
    assert "dnf versionlock add --raw" in install
    assert "apt-mark hold" not in install


@pytest.mark.parametrize("family", ["debian", "rhel"])
def test_a_bundle_without_packages_in_the_usual_folder_holds_none(family: Family, tmp_path: Path) -> None:
    text = f'{mlnx_ofed.HOLDS[family]}packages=$(bundle_packages); echo "[$packages]"'
    assert sh(text, cwd=tmp_path) == ["[]"]


HAS_OFED = on({**stack(), **BUILT})


def bundle_of(given: dict[str, Any], current: str = "MLNX_OFED_LINUX-24.10-1.1.4.0:") -> Answers:
    """The answer of a node on which this bundle was installed; ``current``: what its OFED says that it is."""
    return {BUNDLE: [given["sha256"], "MLNX_OFED_LINUX-24.10-1.1.4.0:", current]}


def test_a_bundle_that_is_installed_is_left_alone(node: Node, given: dict[str, Any]) -> None:
    node.data = {"ofed": {"mlnx_ofed": given}}
    assert node.deploy(ofed.install, {**HAS_OFED, **bundle_of(given)}).flat == []
    # Somebody has installed another one since.
    other = bundle_of(given, "OFED-internal-25.10-1.2.3:")
    assert node.deploy(ofed.install, {**HAS_OFED, **other}).planned[f"{OPS}MLNX_OFED"]


def test_a_node_that_deploys_itself_needs_the_bundle_only_to_install_it(node: Node, given: dict[str, Any]) -> None:
    itself = evolve(node, data={"ofed": {"mlnx_ofed": {**given, "bundle": "/absent.tgz"}}}, connector=OwnConnector)
    assert itself.deploy(ofed.install, {**HAS_OFED, **bundle_of(given)}).flat == []
    (refused,) = itself.deploy(ofed.install, {**HAS_OFED, BUNDLE: ["none", "none"]}).flat
    assert refused.startswith("refuse: ofed: mlnx_ofed.bundle: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"sha256": "0" * 64}, "has "), ({"bundle": "/absent.tgz"}, "mlnx_ofed.bundle: /absent.tgz: No such")],
)
def test_a_bundle_with_another_checksum_stops_the_deploy(
    node: Node, given: dict[str, Any], change: dict[str, str], message: str
) -> None:
    with pytest.raises(DeployError, match=r"node-a\.ofed: mlnx_ofed") as caught:
        node.deploy(ofed.install, on({}), ofed={"mlnx_ofed": {**given, **change}})
    assert message in str(caught.value)


def test_a_bundle_for_another_system_is_refused(node: Node, given: dict[str, Any]) -> None:
    result = node.deploy(ofed.install, {**ROCKY_9, "uname -m": "x86_64"}, ofed={"mlnx_ofed": given})
    assert "this host is Rocky Linux 9.4 on x86_64" in result.refusal
