import hashlib
import shlex
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tasks.common.commands import script
from tasks.drivers import erdma
from tasks.drivers.erdma import LoadedDriver
from tasks.packages import dkms, dnf_install
from tasks.packages.dkms import Builds, ModuleState, NewerInput
from tasks.packages.holds import HeldPackages
from tasks.packages.vendor_repository import KeyFingerprints
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import DEBIAN, ROCKY_9, SIGNATURES, Answers, Node, file_answers, of
from tests.deploy.scripts import ran, sh
from tests.deploy.systems import ROCKY_8, UBUNTU, dpkg, rpm
from tests.programs import failure, success
from tests.stand_ins import program, text_file

FINGERPRINT = "83DB6997E7844970861FCB6BEA39500F9B4DFB6F"
REPOSITORY = {"uri": "http://repo.example.net", "key": "http://repo.example.net/key.asc", "fingerprint": FINGERPRINT}
DKMS: dict[str, Any] = {"source": "dkms", "dkms": {"repository": REPOSITORY, "version": "1.1"}, "compat_mode": True}
SHA256 = "cb44f4c4aaaabfbd81224c85a9e7889732bda26cc832ff70ecc0559bcc14165c"
INSTALLER: dict[str, Any] = {
    "source": "installer",
    "installer": {"url": "http://mirror.example.net/erdma_installer-1.5.7.tar.gz", "sha256": SHA256},
    "compat_mode": False,
}
HEADER = "# Written by Trackbed; changes here are overwritten.\n"
OPTIONS = HEADER + "softdep erdma pre: ib_uverbs\noptions erdma compat_mode=Y\n"
ENVIRONMENT = "ERDMA_CM_NO_BOUND_IF=1 ERDMA_FORCE_MAD_ENABLE=1"
AT_BOOT = HEADER + "ib_core\nib_uverbs\nerdma\n"
SOURCE = f"""\
{HEADER}Types: deb
URIs: http://repo.example.net
Suites: ./
Signed-By: /etc/apt/keyrings/trackbed-erdma.gpg
"""
PATH = "path /lib/modules/6.1.0-9-amd64/updates/dkms/erdma.ko"

MODULE = of(ModuleState)
LOADED = of(LoadedDriver)
BEHIND = of(NewerInput)
STATUS, REQUESTS = of(Builds), of(NodeRebootRequests)
KERNEL = {"uname -r": "6.1.0-9-amd64"}


def there() -> Answers:
    """A node where all is as DKMS wants it."""
    return {
        **DEBIAN,
        MODULE: [PATH, "installed AB", "users 0", "loaded AB"],
        BEHIND: [],
        LOADED: ["mode Y", "users 0"],
        STATUS: "erdma/1.1, 6.1.0-9-amd64, x86_64: installed",
        "uname -r": "6.1.0-9-amd64",
        REQUESTS: ["boot-1"],
        **dpkg("gpg", "erdma-dkms=1.1", "ibverbs-providers"),
        of(HeldPackages): "erdma-dkms",
        of(KeyFingerprints): FINGERPRINT,
        **file_answers(erdma.OPTIONS, OPTIONS),
        **file_answers(erdma.AT_BOOT, AT_BOOT),
        **file_answers(erdma.BUILD_OPTIONS, erdma.build_options(compat_mode=True)),
        **file_answers("/etc/apt/sources.list.d/trackbed-erdma.sources", SOURCE),
    }


def test_nothing_is_done_if_all_is_in_place(node: Node) -> None:
    result = node.deploy(erdma.install, there(), erdma=DKMS)
    assert result.did_nothing
    assert list(result.planned) == [
        "eRDMA | erdma: key of its repository",
        "eRDMA | erdma: repository",
        "eRDMA | Driver's options",
        "eRDMA | Build's options",
        "eRDMA | DKMS package",
        "eRDMA | Driver built",
        "eRDMA | Driver at boot",
        "eRDMA | Driver loaded",
    ]


def test_a_fresh_node_gets_options_package_and_driver(node: Node) -> None:
    nothing: Answers = {MODULE: ["path "], BEHIND: [], LOADED: [], STATUS: [], REQUESTS: ["boot-1"]}
    fresh = {**DEBIAN, **nothing, **dpkg("gpg"), **KERNEL}
    built = {MODULE: [PATH, "installed AB"], STATUS: "erdma/1.1, 6.1.0-9-amd64, x86_64: installed"}
    result = node.deploy(erdma.install, fresh, {**fresh, **built}, erdma=DKMS)
    assert not result.failed
    assert result.uploads[erdma.OPTIONS] == OPTIONS.encode()
    assert result.uploads[erdma.AT_BOOT] == AT_BOOT.encode()
    assert f"/usr/bin/env {ENVIRONMENT} $PRE_BUILD" in result.uploads[erdma.BUILD_OPTIONS].decode()
    order = list(result.commands)
    assert order.index("eRDMA | Build's options") < order.index("eRDMA | DKMS package")
    install, hold = result.commands["eRDMA | DKMS package"]
    assert install.endswith(" sh erdma '' erdma-dkms=1.1 ibverbs-providers")
    assert hold.endswith("apt-mark hold erdma-dkms")
    assert result.commands["eRDMA | Driver built"] == []
    [load] = result.commands["eRDMA | Driver loaded"]
    assert load.endswith(" sh Y no")


@pytest.mark.parametrize(
    ("answers", "reload"),
    [
        ({MODULE: [PATH, "installed AB", "users 0", "loaded CD"]}, True),
        ({LOADED: ["mode N", "users 0"]}, True),
        ({LOADED: ["mode ", "users 0"]}, True),
        ({LOADED: ["mode N", "users 1"]}, False),
        ({MODULE: [PATH, "installed AB", "users 0", "loaded CD"], LOADED: ["mode Y", "users 0", "queue-pair"]}, False),
    ],
)
def test_another_build_or_mode_is_loaded_again_unless_it_is_in_use(node: Node, answers: Answers, reload: bool) -> None:
    result = node.deploy(erdma.install, {**there(), **answers}, erdma=DKMS)
    [command] = result.commands["eRDMA | Driver loaded"]
    if reload:
        assert command.endswith(" sh Y yes")
    else:
        assert "and the loaded driver is in use" in command
        assert "modprobe" not in command


def test_a_build_after_a_reboot_that_no_deploy_has_seen_is_another_reason_for_a_reboot(node: Node) -> None:
    node.data = {"erdma": DKMS, "reboot": {"policy": "allow"}}
    in_use = {**there(), LOADED: ["mode Y", "users 1"], MODULE: [PATH, "installed CD", "users 1", "loaded AB"]}
    [request] = node.deploy(erdma.install, in_use).commands["eRDMA | Driver loaded"]
    *_, reason = shlex.split(request)
    upgraded = {**in_use, MODULE: [PATH, "installed EF", "users 1", "loaded CD"]}
    result = node.deploy(erdma.install, {**upgraded, REQUESTS: ["boot-2", f"erdma boot-1 {reason} "]})
    assert not result.failed
    [request] = result.commands["eRDMA | Driver loaded"]
    assert " sh /var/lib/trackbed/reboots erdma " in request


@pytest.mark.parametrize("loaded", [["users 0", "loaded CD"], []])
def test_a_driver_that_the_kernel_would_refuse_is_not_loaded(node: Node, loaded: list[str]) -> None:
    refused = {SIGNATURES: ["erdma.ko: the key mok.pub is not enrolled"]}
    result = node.deploy(erdma.install, {**there(), **refused, MODULE: [PATH, "installed AB", *loaded]}, erdma=DKMS)
    refusal = result.refusal
    assert "erdma: with Secure Boot" in refusal and "erdma.ko: the key mok.pub" in refusal


def test_a_satisfied_reboot_request_is_withdrawn(node: Node) -> None:
    result = node.deploy(erdma.install, {**there(), REQUESTS: ["boot-2", "erdma boot-1 something "]}, erdma=DKMS)
    assert result.flat == ["rm -f /var/lib/trackbed/reboots/erdma"]


@pytest.mark.parametrize("newer", ["/usr/src/ofa_kernel/default/Module.symvers", erdma.BUILD_OPTIONS])
def test_the_driver_is_built_anew_when_ofed_or_its_options_are_newer(node: Node, newer: str) -> None:
    result = node.deploy(erdma.install, {**there(), BEHIND: newer}, erdma=DKMS)
    [build] = result.commands["eRDMA | Driver built"]
    assert build.endswith(" sh erdma 1.1 6.1.0-9-amd64 again")


def test_the_kernel_that_is_to_run_counts_and_loading_waits_for_it(node: Node) -> None:
    result = node.deploy(erdma.install, there(), erdma=DKMS, kernel={"release": "6.1.0-10-amd64"})
    [build] = result.commands["eRDMA | Driver built"]
    assert build.endswith(" sh erdma 1.1 6.1.0-10-amd64")
    assert result.commands["eRDMA | Driver loaded"] == []


@pytest.mark.parametrize(("boot", "waits"), [("boot-1", True), ("boot-0", False)])
def test_a_driver_that_does_not_fit_waits_for_ofeds_reboot(node: Node, boot: str, waits: bool) -> None:
    """It is built against OFED's ib_core. If it failed the host, the reboot would never come."""
    node.data = {"erdma": DKMS, "reboot": {"policy": "allow"}}
    requests = {REQUESTS: ["boot-1", f"ofed {boot} installed modules are not the loaded ones "]}
    unloaded = {MODULE: [PATH, "installed AB"], LOADED: []}
    loads = node.deploy(erdma.install, {**there(), **unloaded, **requests}).commands["eRDMA | Driver loaded"]
    assert any("modprobe erdma" in command for command in loads) is not waits


def test_the_installer_waits_for_the_kernel_that_is_to_run(node: Node) -> None:
    node.data = {"erdma": INSTALLER, "kernel": {"release": "6.1.0-10-amd64"}}
    result = node.deploy(erdma.install, {**there(), **ROCKY_8, erdma.INSTALLED: [], STATUS: []})
    assert not result.failed
    for name in ("Installer", "Driver built", "Driver loaded"):
        assert result.commands[f"eRDMA | {name}"] == []


def test_the_vendors_installer_gets_its_url_and_checksum(node: Node) -> None:
    answers = {**there(), **ROCKY_8, erdma.INSTALLED: []}
    result = node.deploy(erdma.install, {**answers, MODULE: ["path "]}, answers, erdma=INSTALLER)
    [run] = result.commands["eRDMA | Installer"]
    assert run.endswith(f" sh {INSTALLER['installer']['url']} {SHA256} {erdma.INSTALLED} no")


@pytest.mark.parametrize(
    ("system", "listing", "install"),
    [
        (ROCKY_8, rpm("dkms", "cmake"), str(dnf_install("gcc-c++"))),
        (UBUNTU, dpkg("dkms", "debhelper", "build-essential"), " sh autotools-dev libnl-3-dev libnl-route-3-dev cmake"),
    ],
)
def test_what_the_installer_builds_with_is_installed_before_it(
    node: Node, system: Answers, listing: Answers, install: str
) -> None:
    result = node.deploy(erdma.install, {**there(), **listing, **system, erdma.INSTALLED: []}, erdma=INSTALLER)
    (command,) = result.commands["eRDMA | Installer's packages"]
    assert command.endswith(install)
    names = list(result.commands)
    assert names.index("eRDMA | Installer's packages") < names.index("eRDMA | Installer")


def test_an_installer_that_has_run_is_not_run_again(node: Node) -> None:
    node.data = {"erdma": {**INSTALLER, "compat_mode": True}}
    needs = rpm(*erdma.INSTALLER_NEEDS["rhel"])
    result = node.deploy(
        erdma.install, {erdma.INSTALLED: [f"file {erdma.INSTALLED}", f":{SHA256}"], **needs, **there(), **ROCKY_8}
    )
    assert result.commands["eRDMA | Installer's packages"] == result.commands["eRDMA | Installer"] == []


def test_the_in_tree_driver_needs_only_options(node: Node) -> None:
    node.data = {"erdma": {"source": "in-tree", "compat_mode": False}}
    kernel_s = "path /lib/modules/6.1.0-9-amd64/kernel/drivers/infiniband/hw/erdma/erdma.ko"
    of_kernel = {MODULE: [kernel_s, "installed AB", "users 0", "loaded AB"]}
    result = node.deploy(erdma.install, {**there(), **of_kernel, **ROCKY_9})
    assert result.uploads[erdma.OPTIONS] == f"{HEADER}softdep erdma pre: ib_uverbs\n".encode()
    assert erdma.BUILD_OPTIONS not in result.uploads
    assert result.commands["eRDMA | Driver loaded"] == []


@pytest.mark.parametrize(
    ("data", "module", "message"),
    [
        ({"source": "in-tree"}, "path ", "have the module erdma"),
        ({"source": "in-tree"}, PATH, "the kernel's own driver"),
        (DKMS, "path /lib/modules/6/kernel/erdma.ko", "that DKMS built"),
    ],
)
def test_what_cannot_work_is_refused_before_the_driver_is_loaded(
    node: Node, data: dict[str, Any], module: str, message: str
) -> None:
    [refusal] = node.deploy(erdma.install, {**there(), MODULE: [module]}, erdma=data).commands["eRDMA | Driver loaded"]
    assert refusal.startswith("refuse: ") and message in refusal


def test_the_installer_on_a_system_that_it_does_not_support_is_refused(node: Node) -> None:
    assert "installer does not support Debian 12" in node.deploy(erdma.install, DEBIAN, erdma=INSTALLER).refusal


# The installer's script, run here for real on an archive of the vendor's shape.


def archive(folder: Path, text: str) -> Path:
    tree = folder / "erdma_installer"
    program(tree / "install.sh", text)
    made = folder / "erdma_installer-1.tar.gz"
    with tarfile.open(made, "w:gz") as tar:
        tar.add(tree, "erdma_installer")
    return made


def run_installer(made: Path, sha256: str, note: Path, mad: str = "no") -> subprocess.CompletedProcess[str]:
    text = erdma._INSTALL.replace('fetch "$url" "$work/archive"', 'cp "$url" "$work/archive"')
    return ran(script(text, str(made), sha256, str(note), mad), DKMS=str(made.parent))


def test_the_installer_is_run_only_with_its_checksum(tmp_path: Path) -> None:
    said = "$ERDMA_CM_NO_BOUND_IF $ERDMA_FORCE_MAD_ENABLE $NEEDRESTART_SUSPEND $*"
    made = archive(tmp_path, f'echo "{said}" > {tmp_path}/ran')
    note = tmp_path / "lib" / "note"
    refused = run_installer(made, SHA256, note)
    checksum = hashlib.sha256(made.read_bytes()).hexdigest()
    assert refused.returncode == 1
    assert f"has the SHA-256 {checksum}, expected is {SHA256}; it was not run" in refused.stderr
    assert not (tmp_path / "ran").exists()
    success(run_installer(made, checksum, note))
    assert (tmp_path / "ran").read_text() == "1  1 --batch\n"
    assert note.read_text() == f"{checksum}\n"
    # As the vendor's controller runs it for the mode that is compatible with RoCE.
    assert run_installer(made, checksum, note, "yes").returncode == 0
    assert (tmp_path / "ran").read_text() == "1 1 1 --batch\n"


def test_an_installer_that_fails_shows_the_build_log_and_is_run_again(tmp_path: Path) -> None:
    log = tmp_path / "erdma/1.0/build/make.log"
    text_file(log, "erdma_cm.c:1:1: error: no such thing\n")
    made = archive(tmp_path, "exit 3")
    note = tmp_path / "note"
    assert "error: no such thing" in failure(run_installer(made, hashlib.sha256(made.read_bytes()).hexdigest(), note))
    assert not note.exists()


# What DKMS does with the file, as dkms 3.0.10 does it: it sources both, and then runs the script with the tree before its path.
BUILD = """
tree=$1
PRE_BUILD="./configure-dkms.sh $2 /usr/src"
. "$3"
run="$tree/$PRE_BUILD"
[[ -x ${run%% *} ]] || exit 1
cd "$tree"
exec $run
"""


@pytest.mark.parametrize(("compat_mode", "built"), [(False, "6.1.0 1 unset"), (True, "6.1.0 1 1")])
def test_each_build_of_dkms_has_the_vendors_environment(tmp_path: Path, compat_mode: bool, built: str) -> None:
    program(tmp_path / "configure-dkms.sh", 'echo "$1 ${ERDMA_CM_NO_BOUND_IF-unset} ${ERDMA_FORCE_MAD_ENABLE-unset}"')
    (tmp_path / "erdma.conf").write_text(erdma.build_options(compat_mode))
    command = ("bash", "-c", BUILD, "bash", str(tmp_path), "6.1.0", str(tmp_path / "erdma.conf"))
    assert ran(shlex.join(command)).stdout == f"{built}\n"


def test_options_that_were_written_after_the_driver_are_newer(tmp_path: Path) -> None:
    module, options = tmp_path / "erdma.ko", tmp_path / "erdma.conf"
    program(tmp_path / "modinfo", f"echo {module}")
    program(tmp_path / "stat", 'cat "$4"')  # the change time of a file, which nobody can set
    module.write_text("7")
    for changed, newer in (("6", []), ("7", []), ("8", [str(options)])):
        options.write_text(changed)
        assert sh(dkms._NEWER_INPUT, "erdma", "6.1.0", options, programs=tmp_path) == newer
