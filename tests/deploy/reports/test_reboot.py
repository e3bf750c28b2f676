"""Public reports of reboots that logind refuses, since a program has a lock: the script runs with programs that stand in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks import reboot_policy
from tests.deploy.scripts import sh
from tests.stand_ins import program

OTHERS = (
    '"handle-lid-switch:sleep" "UPower" "Pause" "block" 0 900 "shutdown" "kubelet" "Kubelet needs time" "delay" 0 901'
)
APT = '"shutdown" "APT" "APT is installing or removing packages" "block" 0 4711'
FLASHER = r'"sleep:shutdown" "flash /dev/nic0" "\"FPGA\" is programmed" "block" 0 4712'


def reboots(root: Path, *answers: str) -> None:
    """A node whose logind answers so, in turn; the last one stays. As busctl prints a(ssssuu)."""
    for number, each in enumerate(answers):
        (root / f"locks.{number}").write_text(f"a(ssssuu) {each.count(' 0 ')} {each}\n")
    program(root / "bin/busctl", f"cd {root}; cat locks.0; if [ -e locks.1 ]; then mv locks.1 locks.0; fi")
    program(root / "bin/sleep", f"echo waited >> {root}/log")
    program(root / "bin/systemd-run", f"echo rebooted >> {root}/log")
    sh(reboot_policy._REBOOT, PATH=f"{root}/bin:{os.environ['PATH']}")


@pytest.mark.parametrize("lock", [pytest.param(APT, id="systemd-38428"), pytest.param(APT, id="subiquity-2182")])
def test_a_reboot_waits_until_no_program_forbids_it(tmp_path: Path, lock: str) -> None:
    reboots(tmp_path, f"{OTHERS} {lock}", OTHERS)
    assert (tmp_path / "log").read_text().split() == ["waited", "rebooted"]


@pytest.mark.parametrize(
    ("lock", "named"),
    [
        pytest.param(
            FLASHER, r'"flash /dev/nic0" (process 4712): "\"FPGA\" is programmed"', id="machine-config-operator-3136"
        ),
        pytest.param(APT, '"APT" (process 4711): "APT is installing or removing packages"', id="nixos-anywhere-600"),
    ],
)
def test_a_program_that_forbids_the_reboot_for_long_is_named(tmp_path: Path, lock: str, named: str) -> None:
    with pytest.raises(AssertionError) as caught:
        reboots(tmp_path, f"{OTHERS} {lock}")
    assert f"since a program forbids it: {named}; wait until" in str(caught.value)
    assert "rebooted" not in (tmp_path / "log").read_text().split()
