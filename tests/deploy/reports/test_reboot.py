"""Public reports of reboots that logind refuses, or that systemd shortens: the script runs with programs that stand in."""

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
    sh(reboot_policy._REBOOT, programs=root / "bin")


def test_a_reboot_waits_until_no_program_forbids_it(tmp_path: Path) -> None:
    reboots(tmp_path, f"{OTHERS} {APT}", OTHERS)
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


# systemctl of systemd 255 and later (logind_reboot in systemctl-logind.c), with a kernel loaded and a root file system there.
SYSTEMCTL = """
if [ -z "$SYSTEMCTL_SKIP_AUTO_SOFT_REBOOT" ]; then how=soft-reboot
elif [ -z "$SYSTEMCTL_SKIP_AUTO_KEXEC" ]; then how=kexec
else how=firmware
fi
echo "$1 by $how" >> {}/log
"""
RUN = """
while :; do
  case $1 in --setenv=*) export "${1#--setenv=}" ;; --*) ;; *) exec "$@" ;; esac
  shift
done
"""


def test_a_reboot_goes_through_the_firmware_whatever_kexec_has_loaded(tmp_path: Path) -> None:
    program(tmp_path / "bin/busctl", "echo 'a(ssssuu) 0'")
    program(tmp_path / "bin/systemctl", SYSTEMCTL.format(tmp_path))
    program(tmp_path / "bin/systemd-run", RUN)
    sh(reboot_policy._REBOOT, programs=tmp_path / "bin")
    assert (tmp_path / "log").read_text() == "reboot by firmware\n"
