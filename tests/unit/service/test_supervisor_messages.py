"""What the supervisor does with its worker's messages, and with a worker whose messages it does not understand."""

import pytest

from agent.report.records import report_from_json
from tests.contract.asking import soon
from tests.unit.service.supervised import NOTED, Start


def test_a_ready_from_a_worker_that_is_leaving_is_ignored(start: Start) -> None:
    leaving = """
if starts == 1: activity.call(PF, "read"); time.sleep(600)
if starts == 2:
    sys.stdin.read(); report(True, "h2"); report(False, "h3"); note("said")
if starts == 3: note(open(folder / "report.json").read())
sys.stdin.read()
"""
    supervised = start(NOTED + leaving, retry=0.1)
    supervised.wait_until_noted("start", "start --avoid 0000:21:00.0", "said", "start")
    report = supervised.wait_for(lambda report: report.spec_hash == "h3")
    # After Starting, WorkerStuck and DeviceTried; h2 was never published.
    assert not report.ready and supervised.changes(report) == 3


@pytest.mark.parametrize(
    "said",
    [
        r"b'nonsense\n'",
        r"b'[1]\n'",
        r"b'{\"ready\": 3}\n'",
        r"b'\xff\xfe\n'",
        r"b'[' * 200000 + b'\n'",
        r"b'\x00\n'",
        "b'x' * (3 << 20)",
    ],
)
def test_a_worker_that_sends_a_malformed_message_is_replaced(start: Start, said: str) -> None:
    supervised = start(
        NOTED
        + f"""
def note_report(): note((folder / "report.json").read_text().strip())
if starts == 1:
    report(True)
    os.write(1, {said})
    sys.stdin.read(); note_report(); sys.exit()
note_report(); report(True, "h2"); sys.stdin.read()
"""
    )
    supervised.wait_for(lambda report: report.ready and report.spec_hash == "h2")
    leaving, between = (report_from_json(supervised.noted()[line]) for line in (1, 3))
    assert (leaving.ready, leaving.conditions[-1].reason) == (False, "WorkerLost")
    assert leaving.conditions[-1].message.endswith("; another one takes its place")
    assert not between.ready
    last = between.conditions[-1]
    assert ("a line of more than 1048576 bytes" in last.message) is ("<< 20" in said)
    assert last.reason == "WorkerLost" and "cannot be understood" in last.message


def test_what_cannot_be_understood_is_reported_with_the_beginning_of_the_line(start: Start) -> None:
    body = "if starts == 1: os.write(1, b'[' + b'1, ' * 100 + b'1]' + bytes([10])); sys.stdin.read(); sys.exit()\n"
    supervised = start(NOTED + body + 'note(open(folder / "report.json").read()); sys.stdin.read()')
    soon(lambda: supervised.noted()[2:] or None, "second start", 60.0)
    message = report_from_json(supervised.noted()[2]).conditions[-1].message
    assert f": b'[{'1, ' * 26}1': it is not a JSON object" in message


def test_half_a_line_of_a_worker_that_ends_is_not_published(start: Start) -> None:
    supervised = start(NOTED + 'if starts == 1: os.write(1, b"{\\"ready\\": tr"); sys.exit(4)\nsys.stdin.read()')
    lost = supervised.wait_for(lambda report: report.conditions[-1].reason == "WorkerLost")
    assert "status 4" in lost.conditions[-1].message
    supervised.wait_until_noted("start", "start")


def test_an_unchanged_result_does_not_change_the_generation(start: Start) -> None:
    supervised = start(NOTED + "report(True); report(True); report(True); report(False); sys.stdin.read()")
    report = supervised.wait_for(lambda report: not report.ready and report.spec_hash == "h1")
    assert supervised.changes(report) == 2


def test_a_message_that_comes_in_pieces_is_read_as_one(start: Start) -> None:
    supervised = start("report(True, 'h' * 500000); sys.stdin.read()")
    assert supervised.wait_for(lambda report: report.ready).spec_hash == "h" * 500000
