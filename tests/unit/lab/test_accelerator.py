"""Under which accelerator a lab runs. The programs of QEMU here are scripts: whether a guest boots is the probe's to say."""

import json
from pathlib import Path

import pytest

from lab import instance
from lab.errors import BadInput
from lab.hardware import MACHINES
from lab.image import Image
from lab.instance import Instance, Plan
from lab.qemu import accelerator
from lab.qemu.accelerator import KVM, TCG, choose
from tests.stand_ins import program

BOOTS = f"echo '[    1.0] Kernel panic - not syncing: VFS: {accelerator.MARKER}'"


@pytest.fixture
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with a device for KVM and no choice of the user; a folder, first in PATH, whose ``asked`` has a line a probe."""
    device = tmp_path / "kvm"
    device.touch()
    (tmp_path / "trackbed").mkdir()
    monkeypatch.setattr(accelerator, "KVM_DEVICE", str(device))
    monkeypatch.setattr(accelerator, "PROBE_S", 60.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("TRACKBED_LAB_ACCEL", raising=False)
    return tmp_path


def qemu(folder: Path, does: str) -> None:
    program(folder / "qemu-system-x86_64", f'echo "$*" >> {folder}/asked\n{does}')


def asked(folder: Path) -> list[str]:
    file = folder / "asked"
    return file.read_text().splitlines() if file.exists() else []


def test_a_host_on_which_a_guest_boots_uses_kvm_and_is_probed_once_a_boot(
    probed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    qemu(probed, BOOTS)
    assert choose(probed / "vmlinuz") == choose(probed / "vmlinuz") == KVM
    (words,) = asked(probed)
    assert "-accel kvm -cpu host" in words
    assert capsys.readouterr().err.splitlines() == ["the nodes run on this host's CPUs (kvm)"] * 2
    known = probed / "trackbed" / "kvm.json"
    known.write_text(json.dumps({**json.loads(known.read_text()), "boot": "an earlier one"}))
    choose(probed / "vmlinuz")
    assert len(asked(probed)) == 2


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("echo 'Assertion failed' >&2; kill -ABRT $$", ": Assertion failed"),
        ("echo 'Could not access KVM kernel module' >&2; exit 1", "Could not access KVM kernel module"),
        ("echo '[    0.0] Linux version 6.1'", "a guest does not boot by kvm: [    0.0] Linux version 6.1"),
        ("exit 0", "QEMU ended with 0"),
        ("exec sleep 1000", "within 1 s"),
    ],
)
def test_a_host_whose_kvm_does_not_work_emulates_and_says_why(
    probed: Path, does: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "sleep" in does:
        monkeypatch.setattr(accelerator, "PROBE_S", 1.0)
    qemu(probed, does)
    assert choose(probed / "vmlinuz") == choose(probed / "vmlinuz") == TCG
    assert len(asked(probed)) == 1
    (said, _) = capsys.readouterr().err.splitlines()
    assert said.startswith("the nodes are emulated (tcg): ")
    assert said.endswith(why)


def test_a_host_without_qemu_or_with_a_damaged_record_emulates(probed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (probed / "trackbed" / "kvm.json").write_text("[")
    monkeypatch.setenv("PATH", str(probed))
    assert choose(probed / "vmlinuz") == TCG


def test_a_host_without_kvm_is_not_probed(
    probed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accelerator, "KVM_DEVICE", str(probed / "none"))
    qemu(probed, BOOTS)
    assert choose(probed / "vmlinuz") == TCG
    assert asked(probed) == []
    assert f"{probed}/none " in capsys.readouterr().err


def test_the_user_decides(probed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qemu(probed, BOOTS)
    for name, wanted in (("kvm", KVM), ("tcg", TCG)):
        monkeypatch.setenv("TRACKBED_LAB_ACCEL", name)
        assert choose(probed / "vmlinuz") == wanted
    assert asked(probed) == []
    monkeypatch.setenv("TRACKBED_LAB_ACCEL", "xen")
    with pytest.raises(BadInput, match="TRACKBED_LAB_ACCEL=xen: no such accelerator"):
        choose(probed / "vmlinuz")


@pytest.mark.parametrize("wanted", [KVM, TCG])
def test_a_lab_keeps_its_accelerator(tmp_path: Path, wanted: accelerator.Accelerator) -> None:
    """A snapshot of one is not restored under the other."""
    lab = Instance("t", tmp_path)
    lab.make_keys(MACHINES)
    plan = Plan(Image(tmp_path / "image"), wanted, {machine.name: instance.free_port() for machine in MACHINES})
    lab.record(plan)
    assert lab.plan() == plan
