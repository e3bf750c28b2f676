"""interfaces(5) on real files."""

from pathlib import Path

import pytest

from agent.hardware import ifupdown
from agent.linux.files import LinuxFiles


def test_a_folder_that_a_pattern_names_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interfaces.d" / "old").mkdir(parents=True)
    fabric = tmp_path / "interfaces.d" / "fabric"
    fabric.write_text("iface eth1 inet dhcp\n")
    (tmp_path / "interfaces").write_text("source interfaces.d/*\nsource interfaces\niface eth0\n")
    monkeypatch.setattr(ifupdown, "INTERFACES", str(tmp_path / "interfaces"))
    found = list(ifupdown.stanzas(LinuxFiles()))
    assert found == [(str(tmp_path / "interfaces"), "eth0", ""), (str(fabric), "eth1", "dhcp")]
