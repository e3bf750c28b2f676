"""What the supervisor tells systemd: when it is ready, reloads and stops, also if systemd's socket cannot be used."""

import signal
import time
from pathlib import Path

import pytest

from tests.notify_socket import full_socket, wait_for
from tests.unit.service.supervised import Start


@pytest.mark.parametrize("address", ["/nonexistent/notify", "/" + "x" * 200, "nonsense"])
def test_the_supervisor_runs_on_without_a_usable_notify_socket(start: Start, address: str) -> None:
    supervised = start("report(True); sys.stdin.read()", notify=address)
    before = supervised.wait_for(lambda report: report.ready)
    supervised.wait_for(lambda report: report.heartbeat > before.heartbeat)
    supervised.end()


def test_the_supervisor_runs_on_if_the_notify_socket_is_full(start: Start, tmp_path: Path) -> None:
    with full_socket(tmp_path / "full") as full:
        supervised = start("report(True); sys.stdin.read()", notify=str(tmp_path / "full"))
        before = supervised.wait_for(lambda report: report.ready)
        supervised.wait_for(lambda report: report.heartbeat > before.heartbeat)
        # systemd ends a unit that does not send READY=1 in time.
        wait_for(b"READY=1", full)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_systemd_is_notified_of_a_reload_and_of_the_end(start: Start, number: int) -> None:
    def notification() -> str:
        while (text := supervised.notified.recv(200).decode()) == "WATCHDOG=1":
            pass
        return text

    supervised = start("report(True)\nfor line in sys.stdin: report(True, 'h2')")
    assert notification() == "READY=1"
    began = time.monotonic_ns() // 1000
    supervised.process.send_signal(signal.SIGHUP)
    reloading, _, at = notification().partition("\nMONOTONIC_USEC=")
    assert (reloading, notification()) == ("RELOADING=1", "READY=1")
    assert began <= int(at) <= time.monotonic_ns() // 1000
    supervised.process.send_signal(number)
    assert notification() == "STOPPING=1"
    assert supervised.process.wait(60) == 0
    last = supervised.report()
    assert (last.ready, last.conditions[-1].reason) == (False, "Stopped")
