"""When a device that hung is tried again, and what the next worker learns of it."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agent.service.hung_device import LAST_RETRY, HungDevice
from tests.unit.service.supervised import NOTED, Start


def test_each_time_that_it_hangs_doubles_the_wait_up_to_an_hour() -> None:
    device, now, waits = HungDevice(), 100.0, []
    for _ in range(30):
        device.again(60.0, now)
        waits.append(device.retry_at - now)
        now = device.retry_at
    assert waits[:7] == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, LAST_RETRY]
    assert set(waits[7:]) == {LAST_RETRY}


def test_however_often_a_device_hangs_the_wait_can_be_calculated() -> None:
    device = HungDevice(times=100_000, retry_at=10.0)
    device.again(1e-9, 10.0)
    assert device.retry_at == pytest.approx(10.0 + 1e-9 * 2**16)


@pytest.mark.parametrize(("quiet", "wait"), [(LAST_RETRY, 4.0), (LAST_RETRY + 1.0, 1.0)])
def test_after_a_long_time_without_a_hang_it_counts_as_never_hung(quiet: float, wait: float) -> None:
    device = HungDevice(times=2, retry_at=50.0)
    now = 50.0 + quiet
    device.again(1.0, now)
    assert device.retry_at == now + wait


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def test_it_is_over_once_its_time_has_come_and_no_process_hangs_in_it(process: subprocess.Popen[bytes]) -> None:
    device = HungDevice(avoided=True, retry_at=50.0)
    assert [device.is_over(now) for now in (49.9, 50.0)] == [False, True]
    device.abandoned.append(process)
    assert device.is_held() and not device.is_over(50.0)
    process.kill()
    process.wait()
    assert device.is_over(50.0) and not device.is_held()


def test_a_device_that_is_not_avoided_is_not_tried_again() -> None:
    assert not HungDevice().is_over(1e9)


@pytest.mark.parametrize("mode", ["read", "write"])
def test_the_next_worker_learns_of_a_write_that_hung(start: Start, mode: str) -> None:
    hangs = f'activity.doing("vfs", "{mode}"); activity.call(PF, "sriov_numvfs = 8"); report(False); time.sleep(600)'
    body = f"""note(os.environ["TRACKBED_HUNG_WRITES"])
if starts == 1: {hangs}
report(True); sys.stdin.read()"""
    supervised = start(NOTED + body, read=1.0, write=1.0)
    supervised.wait_for(lambda report: report.ready)
    told = {"0000:21:00.0": "vfs: sriov_numvfs = 8 (device 0000:21:00.0) did not return"} if mode == "write" else {}
    assert supervised.noted() == ["start", "{}", "start --avoid 0000:21:00.0", json.dumps(told)]
