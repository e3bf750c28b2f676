"""What is asked about the signatures of modules before the loaded ones are given up. mokutil and modinfo are stand-ins."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tasks.common.commands import script
from tasks.packages import Family, signatures, vendor_repository
from tasks.packages.signatures import RefusedModules
from tasks.packages.vendor_repository import Package
from tests.deploy.conftest import SIGNATURES, Node, of
from tests.deploy.scripts import ran, sh
from tests.deploy.systems import dpkg
from tests.stand_ins import program, text_file

LOCKDOWN = "none [integrity] confidentiality\n"
KEYS = "1a2b3c4d I------ 1 perm 1f030000 0 0 asymmetri Canonical Ltd. Kernel Module Signing: 88f752e5: X509.rsa 0 []\n"
DKMS = "DKMS module signing key"


class Machine:
    """A folder that stands for a node that checks signatures. ``mokutil``: what it says of the key of DKMS."""

    def __init__(self, root: Path, mokutil: str, signer: str = DKMS) -> None:
        self.root = root
        self.put("sys/kernel/security/lockdown", LOCKDOWN)
        self.put("sys/module/module/parameters/sig_enforce", "N\n")
        self.put("proc/keys", KEYS)
        program(root / "bin/mokutil", f'echo "$2 {mokutil}"; case "{mokutil}" in *already*) exit 1;; esac')
        program(root / "bin/modinfo", f'if [ "$2" = signer ]; then echo "{signer}"; fi')

    def put(self, path: str, text: str) -> Path:
        file = self.root / path
        text_file(file, text)
        return file

    def key(self, path: str, name: str = DKMS) -> Path:
        """Make a certificate as DKMS makes it."""
        file = self.put(path, "")
        subprocess.run(
            ["openssl", "req", "-new", "-x509", "-nodes", "-subj", f"/CN={name}", "-newkey", "rsa:2048",
             "-keyout", str(self.root / "key"), "-outform", "DER", "-out", str(file)], check=True, capture_output=True,
        )  # fmt: skip
        return file

    def refused(self, *files: str) -> list[str]:
        return sh(signatures._REFUSED, *files, programs=self.root / "bin", MACHINE=str(self.root))


@pytest.mark.parametrize(
    ("mokutil", "reason"),
    [
        ("is not enrolled", "the key {key} is not enrolled"),
        ("is already in the enrollment request", "the key {key} waits to be enrolled: confirm it at the console"),
        ("is already enrolled", None),
        ("is blocked in dbx", "mokutil --test-key says: {key} is blocked in dbx"),
    ],
)
@pytest.mark.parametrize("path", ["var/lib/dkms/mok.pub", "var/lib/shim-signed/mok/MOK.der", "root/own.der"])
def test_the_key_that_dkms_signs_with_must_be_enrolled(
    tmp_path: Path, path: str, mokutil: str, reason: str | None
) -> None:
    machine = Machine(tmp_path, mokutil)
    key = machine.key(path)
    if path == "root/own.der":
        machine.put("etc/dkms/framework.conf.d/own.conf", f'# mine\nmok_certificate="{key}"\n')
    said = machine.refused("/lib/modules/K/updates/dkms/mlx5_core.ko")
    own = machine.refused(signatures.DKMS)
    if reason is None:
        assert said == own == []
    else:
        assert said[0].startswith(f"mlx5_core.ko: {reason.format(key=key)}")
        assert own[0].startswith(reason.format(key=key))


def test_a_sed_that_stops_at_a_file_that_is_not_there_reads_the_others_too(tmp_path: Path) -> None:
    """As sed of uutils 0.3."""
    sed = shutil.which("sed")
    program(tmp_path / "sed", f'for each; do case $each in /*) [ -e "$each" ] || exit 1 ;; esac; done; exec {sed} "$@"')
    machine = Machine(tmp_path / "machine", "is not enrolled")
    key = machine.key("root/own.der")
    machine.put("etc/dkms/framework.conf.d/own.conf", f"mok_certificate={key}\n")
    said = sh(f"{signatures.JUDGED}certificates", programs=tmp_path, MACHINE=str(tmp_path / "machine"))
    assert said == [str(key)]


def test_modules_of_other_signers_are_judged_by_the_kernels_keys(tmp_path: Path) -> None:
    assert Machine(tmp_path / "a", "is not enrolled", "Canonical Ltd. Kernel Module Signing").refused("x.ko") == []
    vendor = Machine(tmp_path / "b", "is not enrolled", "Mellanox Technologies signing key")
    said = vendor.refused("/lib/x.ko", "/lib/y.ko")
    assert [each.split()[0] for each in said if "(Mellanox Technologies signing key)" in each] == ["x.ko:", "y.ko:"]
    assert Machine(tmp_path / "c", "is not enrolled", "").refused("x.ko") == ["x.ko: it has no signature"]


def test_without_a_key_dkms_would_make_one_that_is_not_enrolled(tmp_path: Path) -> None:
    assert "DKMS has no key yet" in Machine(tmp_path, "is not enrolled").refused(signatures.DKMS)[0]


def test_a_kernel_that_checks_no_signatures_refuses_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "is not enrolled", "")
    machine.put("sys/kernel/security/lockdown", "[none] integrity confidentiality\n")
    assert machine.refused("x.ko") == machine.refused(signatures.DKMS) == []
    machine.put("sys/module/module/parameters/sig_enforce", "Y\n")
    assert machine.refused("x.ko") == ["x.ko: it has no signature"]


def test_packages_whose_modules_would_be_refused_are_not_installed(node: Node) -> None:
    def code() -> None:
        vendor_repository.packages(wanted=(Package("erdma-dkms", "1.1"),), family="debian", module="erdma")

    refused = node.deploy(code, {**dpkg(), of(RefusedModules, "dkms"): ["the key mok.pub is not enrolled"]})
    assert refused.failed
    assert ": the key mok.pub is not enrolled" in refused.errors[0]
    assert all(command.startswith("refuse") for command in refused.flat[:1])
    assert not node.deploy(code, dpkg()).failed


@pytest.mark.parametrize("family", ["debian", "rhel"])
def test_nothing_is_installed_where_the_kernel_loads_no_more_modules(node: Node, family: Family) -> None:
    def code() -> None:
        vendor_repository.packages(wanted=(Package("erdma-dkms", "1.1"),), family=family, module="erdma")

    disabled = node.deploy(code, {**dpkg(), SIGNATURES: [signatures._NO_MORE]})
    assert "erdma: the kernel loads no more modules in this boot (kernel.modules_disabled is 1)" in disabled.errors[0]
    assert not any("install -y" in command or "apt_install" in command for command in disabled.flat)


class Packages:
    """Packages of the RHEL family on a machine: archives, and a dnf, rpm, rpm2cpio and cpio that stand in for those of it."""

    def __init__(self, machine: Machine) -> None:
        self.machine, root = machine, machine.root
        program(root / "bin/uname", "echo 5.14.0-427.el9.x86_64")
        program(root / "bin/rpm", 'tar -tf "$4" 2>/dev/null | sed s,^,/,')
        program(root / "bin/rpm2cpio", 'cat "$1"')
        program(root / "bin/cpio", "tar -x --wildcards '*.ko' 2>/dev/null || true")
        program(
            root / "bin/dnf",
            f'echo "$*" >> {root}/ran\n'
            f'while [ "$#" -gt 0 ]; do if [ "$1" = --destdir ]; then cp {root}/repo/* "$2"; fi; shift; done',
        )
        (root / "repo").mkdir()

    def add(self, name: str, *files: str) -> None:
        root = self.machine.root
        for file in files:
            self.machine.put(f"tree/{file}", "")
        subprocess.run(["tar", "-cf", root / f"repo/{name}.rpm", "-C", root / "tree", *files], check=True)

    def install(self, module: str) -> tuple[str, list[str]]:
        """The error of an installation, and what dnf was asked for."""
        root = self.machine.root
        command = script(vendor_repository._DNF, module, "", "", "doca-ofed-3.2.1")
        done = ran(command, root / "bin", MACHINE=str(root))
        assert done.returncode == bool(done.stderr), done.stderr
        asked = (root / "ran").read_text().splitlines()
        return done.stderr, ["download" if "--downloadonly" in each else "install" for each in asked]


KMOD, SOURCE = "lib/modules/5.14/extra/mlx5_core.ko", "usr/src/mlnx-ofa_kernel-25.10/dkms.conf"


@pytest.mark.parametrize(
    ("signer", "mokutil", "file", "refused"),
    [
        ("Mellanox signing key", "", KMOD, "mlx5_core.ko: the kernel has no key of its signer (Mellanox signing key)"),
        ("Canonical Ltd. Kernel Module Signing", "", KMOD, ""),
        (DKMS, "is not enrolled", SOURCE, "/mok.pub is not enrolled"),
        (DKMS, "is already enrolled", SOURCE, ""),
    ],
)
def test_dnf_installs_no_package_whose_modules_the_kernel_would_refuse(
    tmp_path: Path, signer: str, mokutil: str, file: str, refused: str
) -> None:
    machine = Machine(tmp_path, mokutil, signer)
    machine.key("var/lib/dkms/mok.pub")
    packages = Packages(machine)
    packages.add("kmod-mlnx-ofa_kernel", file)
    packages.add("doca-ofed", "usr/share/doc/README")
    error, ran = packages.install("mlnx-ofa_kernel")
    if refused:
        assert "mlnx-ofa_kernel: nothing is installed: " in error
        assert refused in error and "mokutil --import" in error
        assert ran == ["download"]
    else:
        assert (error, ran) == ("", ["download", "install"])


def test_dnf_installs_at_once_what_has_no_modules_and_where_signatures_do_not_count(tmp_path: Path) -> None:
    packages = Packages(Machine(tmp_path, "is not enrolled", ""))
    packages.add("kmod-x", KMOD)
    assert packages.install("") == ("", ["install"])
    packages.machine.put("sys/kernel/security/lockdown", "[none] integrity confidentiality\n")
    (tmp_path / "ran").unlink()
    assert packages.install("mlnx-ofa_kernel") == ("", ["install"])
