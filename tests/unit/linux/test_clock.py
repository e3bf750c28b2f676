"""The clock's state is read from timedated, by the system's D-Bus."""

from pathlib import Path

import pytest

from agent.linux.system import LinuxSystem


def test_a_machine_without_dbus_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path / 'missing'}")
    with pytest.raises(OSError, match="the system's D-Bus cannot be reached"):
        LinuxSystem().clock_synchronised()
