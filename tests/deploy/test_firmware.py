"""Firmware of Mellanox NICs, by mstconfig's output as public issues quote it: not run on ConnectX."""

from typing import Any

import pytest

from tasks import firmware, reboot
from tasks.common.commands import script
from tasks.firmware import FirmwareSettings
from tasks.packages import dnf_install
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import DEBIAN, ROCKY_9, Answers, Node, of
from tests.deploy.packages.test_packages import install
from tests.deploy.scripts import sh
from tests.stand_ins import program

PCI = "0000:18:00.0"
QUERY = of(FirmwareSettings)
REQUESTS = of(NodeRebootRequests)


def printed(sriov: str, vfs: str, link: str = "ETH(2)          ETH(2)") -> list[str]:
    return f"""\

Device #1:
----------

Device type:        ConnectX6DX
Device:             {PCI}

Configurations:                              Default         Current         Next Boot
         HOST_CHAINING_DESCRIPTORS           Array[0..7]     Array[0..7]     Array[0..7]
*        NUM_OF_VFS                          0               {vfs}
*        SRIOV_EN                            False(0)        {sriov}
         LINK_TYPE_P1                        IB(1)           {link}
The '*' shows parameters with next value different from default/current value.
""".splitlines()


def answers(lines: list[str], *requests: str) -> Answers:
    card = [f"card {PCI}", *(f"line {line}" for line in lines)]
    return {**DEBIAN, "dpkg -l": "ii  mstflint  4.21  amd64  x", QUERY: card, REQUESTS: ["boot-1", *requests]}


def commands(node: Node, answers: Answers, **given: Any) -> list[str]:
    node.data = {"firmware": {"nics": [{"pci": PCI, **given}]}}
    return node.deploy(firmware.configure, answers).flat


OFF = printed("False(0)        False(0)", "0               0")
SET = printed("False(0)        True(1)", "0               16")
ON = printed("True(1)         True(1)", "16              16")


def record(text: str) -> str:
    return str(script(reboot._REQUEST, reboot.FOLDER, "firmware", text))


REQUEST = f"{PCI} SRIOV_EN is 0, not 1; {PCI} NUM_OF_VFS is 0, not 16"
LOCKED = [line.replace("*        SRIOV_EN", "*RO      SRIOV_EN") for line in ON]
OLD = f"rm -f {reboot.FOLDER}/firmware"


def writes(settings: str) -> str:
    return f"mstconfig -y -d {PCI} set {settings}"


@pytest.mark.parametrize(
    ("answered", "given", "made"),
    [
        (answers(OFF), {"vfs": 16, "link_types": ["ETH"]}, [writes("SRIOV_EN=1 NUM_OF_VFS=16"), record(REQUEST)]),
        (answers(ON), {"vfs": 16, "sriov": True}, []),
        (answers(ON, "firmware boot-0 else "), {"vfs": 16}, [OLD]),
        (answers(LOCKED), {"sriov": True}, []),
        (answers(LOCKED), {"sriov": False}, [writes("SRIOV_EN=0"), record(f"{PCI} SRIOV_EN is 1, not 0")]),
        (
            answers(ON), {"sriov": False, "link_types": ["IB"]},
            [writes("SRIOV_EN=0 LINK_TYPE_P1=1"), record(f"{PCI} SRIOV_EN is 1, not 0; {PCI} LINK_TYPE_P1 is 2, not 1")],
        ),
    ],
    ids=["new", "in effect", "in effect since the boot", "read-only", "read-only and another", "SR-IOV off, and InfiniBand"],
)  # fmt: skip
def test_settings_that_are_not_those_of_the_next_boot_are_written_and_request_a_reboot(
    node: Node, answered: Answers, given: dict[str, Any], made: list[str]
) -> None:
    assert LOCKED != ON
    assert commands(node, answered, **given) == made


def test_settings_of_the_next_boot_still_request_the_reboot(node: Node) -> None:
    assert commands(node, answers(SET), vfs=16) == [record(REQUEST)]
    assert commands(node, answers(SET, f"firmware boot-1 {REQUEST} "), vfs=16) == []


def test_a_parameter_that_the_card_does_not_have_is_refused(node: Node) -> None:
    (message, *_) = commands(node, answers(OFF), link_types=["ETH", "ETH"])
    assert message.startswith(f"refuse: firmware: {PCI} does not have LINK_TYPE_P2; remove it")


def test_an_address_that_is_not_a_card_is_refused(node: Node) -> None:
    gone = {**answers([]), QUERY: [f"card {PCI}", "error -E- Failed to open the device"]}
    result = node.deploy(firmware.configure, gone, firmware={"nics": [{"pci": PCI, "vfs": 4}]})
    assert result.failed
    assert result.flat[0].startswith(f"refuse: firmware: mstconfig cannot read {PCI}: -E- Failed to open the device")


def test_the_tool_comes_from_the_distribution(node: Node) -> None:
    node.data = {"firmware": {"nics": [{"pci": PCI, "vfs": 4}]}}
    none = {QUERY: [f"card {PCI}", "error mstconfig is not installed"], REQUESTS: ["boot-1"]}
    result = node.deploy(firmware.configure, {**DEBIAN, **none}, {**answers(OFF), "dpkg -l": ""})
    assert result.commands["Firmware | mstflint"] == [install("mstflint")]
    assert result.commands["Firmware | Settings"] == [
        writes("SRIOV_EN=1 NUM_OF_VFS=4"),
        record(f"{PCI} SRIOV_EN is 0, not 1; {PCI} NUM_OF_VFS is 0, not 4"),
    ]
    result = node.deploy(firmware.configure, {**ROCKY_9, **none})
    assert result.commands["Firmware | mstflint"] == [str(dnf_install("mstflint"))]


def test_without_the_key_nothing_is_looked_at(node: Node) -> None:
    assert not any(node.deploy(firmware.configure, {REQUESTS: ["boot-1"]}).planned.values())


def test_the_script_reads_settings_and_errors_of_mstconfig(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{tmp_path}:/usr/bin:/bin"
    assert firmware.FirmwareSettings().process(sh(firmware._QUERY, PCI, PATH=path))[PCI].error
    text = "\n".join(SET)
    program(
        tmp_path / "mstconfig",
        f"case \"$3\" in {PCI}) cat <<'END'\n{text}\nEND\n;; *) echo; echo '-E- none' >&2; exit 3 ;; esac",
    )
    fact = firmware.FirmwareSettings().process(sh(firmware._QUERY, PCI, "0000:19:00.0", PATH=path))
    assert fact["0000:19:00.0"].error == "-E- none"
    assert fact[PCI].settings == {
        "NUM_OF_VFS": firmware.Setting(0, 16),
        "SRIOV_EN": firmware.Setting(0, 1),
        "LINK_TYPE_P1": firmware.Setting(2, 2),
    }
