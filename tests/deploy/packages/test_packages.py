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
from tests.deploy.systems import dpkg, release, rpm
from tests.stand_ins import program, text_file

DEB = ["python3", "iproute2", "ethtool", "pciutils", "kmod", "rdma-core", "ibverbs-utils", "jq"]
RPM = ["python3", "iproute", "ethtool", "pciutils", "kmod", "rdma-core", "libibverbs-utils", "jq", "tar"]


RAIL = Nic("rail0", Selector(pci="0000:18:00.0"), rdma=RdmaDevices())


def base(*nics: Nic) -> None:
    packages.base(spec=NodeSpec("node-a", nics=nics))


def install(*names: str) -> str:
    """What installs packages on Debian and Ubuntu."""
    return str(script(f'{packages.APT}apt_update\napt_install install -- "$@"', *names))


def test_a_fresh_debian_gets_the_base_packages(node: Node) -> None:
    result = node.deploy(base, {**DEBIAN, **dpkg("python3", "kmod")})
    assert result.planned == {"Base packages": True}
    assert result.flat == [install("iproute2", "ethtool", "pciutils", "rdma-core", "ibverbs-utils", "jq")]


APT_GET = """
echo "apt-get $*" | sed 's/ -o [^ ]*//g' >> "$LOG"
if [ -e "$DPKG_ADMINDIR/updates/0001" ]; then echo "E: dpkg was interrupted" >&2; exit 100; fi
"""
DPKG = """
echo "dpkg $*" >> "$LOG"
rm -f "$DPKG_ADMINDIR/updates/0001"
exit "$CODE"
"""


@pytest.mark.parametrize(("code", "repaired"), [("0", []), ("1", ["--fix-broken --no-remove install"])])
def test_what_a_power_cut_has_interrupted_is_completed_first(tmp_path: Path, code: str, repaired: list[str]) -> None:
    for name, text in {"apt-get": APT_GET, "dpkg": DPKG}.items():
        program(tmp_path / name, text)
    updates, log = tmp_path / "admin/updates", tmp_path / "log"
    text_file(updates / "0001")
    environment = {"DPKG_ADMINDIR": str(updates.parent), "LOG": str(log), "CODE": code}
    sh(f'{packages.APT}apt_install install -- "$@"', "jq", programs=tmp_path, **environment)
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
    environment = {"DPKG_ADMINDIR": str(tmp_path), "LOG": str(log)}
    with pytest.raises(AssertionError):
        sh(f'{packages.APT}apt_install install -- "$@"', "jq", programs=tmp_path, **environment)
    assert log.read_text() == "ran\n"


def test_a_node_that_must_have_rdma_devices_gets_programs_to_test_them(node: Node) -> None:
    result = node.deploy(lambda: base(RAIL), {**DEBIAN, **dpkg(*DEB)})
    assert result.planned == {"Base packages": False, "RDMA tools": True}
    assert result.flat == [install("rdmacm-utils", "infiniband-diags", "perftest")]


def test_with_ofed_these_programs_come_from_ofed(node: Node) -> None:
    node.data = {"ofed": {"inbox": {}}}
    assert node.deploy(lambda: base(RAIL), {**DEBIAN, **dpkg(*DEB)}).planned == {"Base packages": False}


@pytest.mark.parametrize(
    "answers",
    [
        {**DEBIAN, **dpkg(*DEB)},
        {**ROCKY_9, **rpm(*RPM, "python3.11"), PYTHON: "/usr/bin/python3.11"},
        # Where python3 has another name.
        {**release("rhel", "8.10"), **rpm("python36", *RPM[1:], "python3.11"), PYTHON: "/usr/bin/python3.11"},
    ],
    ids=["debian", "rocky-9", "rhel-8"],
)
def test_nothing_is_done_when_all_is_installed(node: Node, answers: Answers) -> None:
    result = node.deploy(base, answers)
    assert result.planned == {"Base packages": False}
    assert result.flat == []
    assert not any("dnf" in command for command in result.ran)


@pytest.mark.parametrize(
    ("answers", "first", "last"),
    [
        ({**ROCKY_9, **rpm("python3", "kmod")}, [], ["python3.11"]),
        ({**release("rhel", "10.0"), **rpm("kmod")}, ["python3"], []),
    ],
    ids=["rocky-9", "rhel-10"],
)
def test_a_fresh_node_with_dnf_gets_a_python_that_is_new_enough(
    node: Node, answers: Answers, first: list[str], last: list[str]
) -> None:
    result = node.deploy(base, answers)
    others = ("iproute", "ethtool", "pciutils", "rdma-core", "libibverbs-utils", "jq", "tar")
    assert result.flat == [str(dnf_install(*first, *others, *last))]
    assert not any("repoquery" in command for command in result.ran)


def test_the_operating_system_is_read_once(node: Node) -> None:
    def code() -> None:
        base()
        assert packages.system() is packages.system()

    result = node.deploy(code, {**ROCKY_9, **rpm(*RPM, "python3.11"), PYTHON: "/usr/bin/python3.11"})
    assert len([command for command in result.ran if "-release" in command]) == 1


@pytest.mark.parametrize(
    ("release", "message"),
    [
        (["ID=debian", 'NAME="Debian"'], "Debian (os-release names no release) is not supported"),
        (["ID=opensuse-leap", 'NAME="openSUSE Leap"', 'VERSION_ID="15.6"'], "openSUSE 15 is not supported"),
        (["ID=sles", 'NAME="SLES"', 'VERSION_ID="16.0"'], "SLES 16 is not supported"),
        pytest.param(
            ['ID="amzn"', 'NAME="Amazon Linux"', 'VERSION_ID="2023"', 'ID_LIKE="fedora"'],
            "Amazon Linux 2023 is not supported",
            id="res-15",
        ),
        pytest.param(
            ["ID=azurelinux", 'NAME="Microsoft Azure Linux"', 'VERSION_ID="3.0"'],
            "Azure Linux 3 is not supported",
            id="gpu-provisioner-158",
        ),
        (["ID=ubuntu", 'NAME="Ubuntu"', 'VERSION_ID="20.04"'], "Ubuntu 20 is not supported"),
        ([], "unknown"),
    ],
)
def test_an_unsupported_release_is_refused(node: Node, release: list[str], message: str) -> None:
    error = node.deploy(base, {"*-release": ["/etc/os-release", *release, "---"]}).refusal
    assert error.startswith("[@fake/node-a] ") and message in error and "Ubuntu 22" in error
