"""The scripts of small tasks: these tests run them in a temporary folder."""

from pathlib import Path

import pytest

from agent.kinds.host.irqbalance import LIST
from tasks import reboot
from tasks.host import irqbalance, network_managers
from tests.deploy.scripts import sh
from tests.stand_ins import program


@pytest.mark.parametrize(
    ("version", "managers"),
    [
        ("systemd 252 (252.39-1~deb12u2)", ["NetworkManager", "systemd-networkd"]),
        ("systemd 244.3", ["NetworkManager", "systemd-networkd"]),
        ("systemd 239 (239-82.el8)", ["NetworkManager"]),
    ],
)
def test_network_managers_that_can_ignore_vfs_are_found(tmp_path: Path, version: str, managers: list[str]) -> None:
    assert sh(network_managers._MANAGERS, tmp_path) == []
    program(tmp_path / "usr/sbin/NetworkManager")
    program(tmp_path / "usr/lib/systemd/systemd-networkd")
    program(tmp_path / "bin/systemctl", f"echo '{version}'; echo +PAM")
    assert sh(network_managers._MANAGERS, tmp_path, programs=tmp_path / "bin") == managers


def test_vfs_that_udev_has_not_marked_are_found(tmp_path: Path) -> None:
    assert sh(network_managers._UNMARKED, tmp_path) == []
    marks = {"pf0": None, "pf0v0": "E:TRACKBED_VF=1\nV:1\n", "pf0v1": "E:ID_NET_NAME=pf0v1\n", "pf0v2": None}
    (tmp_path / "run/udev/data").mkdir(parents=True)
    for index, (name, mark) in enumerate(marks.items()):
        folder = tmp_path / "sys/class/net" / name
        (folder / "device").mkdir(parents=True)
        (folder / "ifindex").write_text(f"{index}\n")
        if name != "pf0":
            (folder / "device/physfn").mkdir()
        if mark:
            (tmp_path / f"run/udev/data/n{index}").write_text(mark)
    assert sh(network_managers._UNMARKED, tmp_path) == ["pf0v1", "pf0v2"]


def test_irqbalance_bans_listed_functions_and_their_vfs(tmp_path: Path) -> None:
    listed, other, vf, unlisted = "0000:21:00.0", "0000:21:00.1", "0000:21:10.0", "0000:41:00.0"
    text = irqbalance.SCRIPT_SOURCE.read_text().replace(LIST, str(tmp_path / "list"))
    assert str(tmp_path) in text
    for function in (listed, other, vf, unlisted):
        (tmp_path / function).mkdir()
    (tmp_path / vf / "physfn").symlink_to(f"../{listed}")

    def bans(function: str) -> list[str]:
        return sh(text, tmp_path / function, 47)

    assert bans(listed) == []
    (tmp_path / "list").write_text(f"{listed}\n{unlisted.replace('41', '42')}\n")
    assert bans(listed) == bans(vf) == ["ban=true"]
    assert bans(other) == bans(unlisted) == []


def requests(folder: Path) -> reboot.RebootRequests:
    return reboot.NodeRebootRequests().process(sh(reboot._REQUESTS, folder))


def test_reboot_requests_are_written_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "reboots"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert requests(folder) == reboot.RebootRequests(boot_id)
    sh(reboot._REQUEST, folder, "boot", "an old one")
    sh(reboot._REQUEST, folder, "boot", 'it\'s `a` "new" $one')
    sh(reboot._REQUEST, folder, "ofed", "another")
    assert sorted(path.name for path in folder.iterdir()) == ["boot", "ofed"]
    made = (
        reboot.RebootRequest("boot", boot_id, 'it\'s `a` "new" $one'),
        reboot.RebootRequest("ofed", boot_id, "another"),
    )
    assert requests(folder) == reboot.RebootRequests(boot_id, made)
