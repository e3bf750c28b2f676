from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.spec.nic import Nic, RdmaDevices
from agent.spec.node import NodeSpec
from agent.spec.selector import Selector
from tasks import packages
from tasks.common.commands import script
from tasks.packages import dnf_install
from tests.deploy.conftest import DEBIAN, PYTHON, ROCKY_9, Answers, Node
from tests.deploy.scripts import sh
from tests.stand_ins import program

DEB = ["python3", "iproute2", "ethtool", "pciutils", "kmod", "rdma-core", "ibverbs-utils", "jq"]
RPM = ["python3", "iproute", "ethtool", "pciutils", "kmod", "rdma-core", "libibverbs-utils", "jq", "tar"]


RAIL = Nic("rail0", Selector(pci="0000:18:00.0"), rdma=RdmaDevices())


def base(*nics: Nic) -> None:
    packages.base(spec=NodeSpec("node-a", nics=nics))


def dpkg(*names: str) -> Answers:
    return {"dpkg -l": [f"ii  {name}:amd64  1.0-1  amd64  something" for name in names]}


def rpm(*names: str) -> Answers:
    return {"rpm --queryformat": [f"{name} 1.0-1" for name in names]}


def install(*names: str) -> str:
    """What installs packages on Debian and Ubuntu."""
    return str(script(f'{packages.APT}apt_update\napt_install install -- "$@"', *names))


def test_a_fresh_debian_gets_the_base_packages(node: Node) -> None:
    result = node.deploy(base, {**DEBIAN, **dpkg("python3", "kmod")})
    assert result.planned == {"Base packages": True}
    assert result.flat == [install("iproute2", "ethtool", "pciutils", "rdma-core", "ibverbs-utils", "jq")]


APT_GET = """#!/bin/sh
echo "apt-get $*" | sed 's/ -o [^ ]*//g' >> "$LOG"
if [ -e "$DPKG_ADMINDIR/updates/0001" ]; then echo "E: dpkg was interrupted" >&2; exit 100; fi
"""
DPKG = """#!/bin/sh
echo "dpkg $*" >> "$LOG"
rm -f "$DPKG_ADMINDIR/updates/0001"
exit "$CODE"
"""


@pytest.mark.parametrize(("code", "repaired"), [("0", []), ("1", ["--fix-broken --no-remove install"])])
def test_what_a_power_cut_has_interrupted_is_completed_first(tmp_path: Path, code: str, repaired: list[str]) -> None:
    for name, text in {"apt-get": APT_GET, "dpkg": DPKG}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    updates, log = tmp_path / "admin/updates", tmp_path / "log"
    updates.mkdir(parents=True)
    (updates / "0001").touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DPKG_ADMINDIR": str(updates.parent), "LOG": str(log)}
    sh(f'{packages.APT}apt_install install -- "$@"', "jq", **environment, CODE=code)
    apt = "apt-get -q -y --no-install-recommends"
    assert log.read_text().splitlines() == [
        f"{apt} install -- jq",
        "dpkg --force-confdef --force-confold --configure -a",
        *(f"{apt} {each}" for each in repaired),
        f"{apt} install -- jq",
    ]


def test_an_installation_that_fails_otherwise_is_not_repeated(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program(tmp_path / "apt-get", 'echo ran >> "$LOG"\nexit 100')
    (tmp_path / "updates").mkdir()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DPKG_ADMINDIR": str(tmp_path), "LOG": str(log)}
    with pytest.raises(AssertionError):
        sh(f'{packages.APT}apt_install install -- "$@"', "jq", **environment)
    assert log.read_text() == "ran\n"


def test_a_node_that_must_have_rdma_devices_gets_programs_to_test_them(node: Node) -> None:
    result = node.deploy(lambda: base(RAIL), {**DEBIAN, **dpkg(*DEB)})
    assert result.planned == {"Base packages": False, "RDMA tools": True}
    assert result.flat == [install("rdmacm-utils", "infiniband-diags", "perftest")]


def test_with_ofed_these_programs_come_from_ofed(node: Node) -> None:
    node.data = {"ofed": {"inbox": {}}}
    assert node.deploy(lambda: base(RAIL), {**DEBIAN, **dpkg(*DEB)}).planned == {"Base packages": False}


def test_nothing_is_done_when_all_is_installed(node: Node) -> None:
    result = node.deploy(base, {**DEBIAN, **dpkg(*DEB)})
    assert result.planned == {"Base packages": False}
    assert result.flat == []


def test_fresh_rocky_9_gets_a_newer_python(node: Node) -> None:
    result = node.deploy(base, {**ROCKY_9, **rpm("python3", "kmod")})
    assert result.flat == [
        str(dnf_install("iproute", "ethtool", "pciutils", "rdma-core", "libibverbs-utils", "jq", "tar", "python3.11"))
    ]


def test_a_rocky_9_with_a_newer_python_needs_no_other(node: Node) -> None:
    answers = {**ROCKY_9, **rpm(*RPM, "python3.11"), PYTHON: "/usr/bin/python3.11"}
    assert node.deploy(base, answers).flat == []


def test_rhel_8_has_its_python_under_another_name(node: Node) -> None:
    rhel = {"*-release": ["/etc/os-release", "ID=rhel", 'VERSION_ID="8.10"', "---"]}
    names = ["python36", *(name for name in RPM if name != "python3"), "python3.11"]
    result = node.deploy(base, {**rhel, **rpm(*names), PYTHON: "/usr/bin/python3.11"})
    assert result.flat == []
    assert not any("dnf" in command for command in result.ran)


def test_the_operating_system_is_read_once(node: Node) -> None:
    def code() -> None:
        base()
        assert packages.system() is packages.system()

    result = node.deploy(code, {**ROCKY_9, **rpm(*RPM, "python3.11"), PYTHON: "/usr/bin/python3.11"})
    assert len([command for command in result.ran if "-release" in command]) == 1
    assert node.deploy(base, {**DEBIAN, **dpkg(*DEB)}).flat == []


def test_no_repository_is_asked_about_what_is_missing(node: Node) -> None:
    result = node.deploy(base, {**ROCKY_9, **rpm("python3", "kmod")})
    assert not any("repoquery" in command for command in result.ran)


def test_rhel_10_s_python_is_new_enough(node: Node) -> None:
    rhel = {"*-release": ["/etc/os-release", "ID=rhel", 'VERSION_ID="10.0"', "---"]}
    result = node.deploy(base, {**rhel, **rpm("kmod")})
    assert result.flat == [
        str(dnf_install("python3", "iproute", "ethtool", "pciutils", "rdma-core", "libibverbs-utils", "jq", "tar"))
    ]


@pytest.mark.parametrize(
    ("release", "message"),
    [
        (["ID=debian", 'NAME="Debian"'], "Debian (os-release names no release) is not supported"),
        (["ID=opensuse-leap", 'NAME="openSUSE Leap"', 'VERSION_ID="15.6"'], "openSUSE 15 is not supported"),
        (["ID=ubuntu", 'NAME="Ubuntu"', 'VERSION_ID="20.04"'], "Ubuntu 20 is not supported"),
        ([], "unknown"),
    ],
)
def test_an_unsupported_release_is_refused(node: Node, release: list[str], message: str) -> None:
    result = node.deploy(base, {"*-release": ["/etc/os-release", *release, "---"]})
    assert result.failed and not result.flat
    [error] = result.errors
    assert error.startswith("[@fake/node-a] ")
    assert message in error
    assert "Ubuntu 22" in error
