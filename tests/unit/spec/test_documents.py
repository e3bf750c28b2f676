"""Foreign documents: too large, too deep, or not JSON."""

import json
import os
import socket
import threading
import tracemalloc
from pathlib import Path

import pytest

from agent.documents import DEEPEST, LARGEST_SPEC, load, read
from agent.report.names import REPORT
from agent.report.records import Report, report_to_json
from agent.report.verdict import NoReport, read_report
from agent.service.apply_socket import NAME, ApplyRefused, ask
from agent.spec.node import SpecError, parse

KEYS = ",".join(f'"k{number}": 1' for number in range(250_000))
NUMBERS = ",".join(["1"] * 1_900_000)
CREATING = [{"name": f"n{n}", "select": {"serial": f"s{n}"}, "vfs": {"count": 1}} for n in range(1500)]
CREATORS = {f"m{number}": {"max_vfs": "1"} for number in range(1500)}
MANY_NAMES = [
    {
        "name": f"n{n}-{{index}}",
        "select": {"serial": f"s{n}", "each": True},
        "altnames": [f"a{n}-{i}-{{index}}" for i in range(20)],
    }
    for n in range(2000)
]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f'{{"node_name": "n1", {KEYS}}}', id="unknown keys"),
        pytest.param(f'{{"node_name": "n1", "nics": [{NUMBERS}]}}', id="numbers"),
        pytest.param(f'{{"node_name": "n1", "nics": {json.dumps([{}] * 4096)}}}', id="empty NICs"),
        pytest.param(f'{{"node_name": "n1", "sysctls": {{{KEYS}}}}}', id="sysctls"),
        pytest.param('{"node_name": "n1", "%s": 1}' % ("k" * 4_000_000), id="a long key"),
        pytest.param('{"node_name": "n1", "gpus": "%s"}' % ("k" * 4_000_000), id="a long text"),
        pytest.param("[" * 900 + "]" * 900, id="deep"),
        pytest.param('{"node_name": ' + "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1) + "}", id="too deep"),
        pytest.param(" " * (4 << 20) + '{"node_name": "n1"}', id="too large"),
        pytest.param('{"node_name": "%s"}' % ("é" * (3 << 20)), id="too large in UTF-8"),
        pytest.param('{"node_name": "n1", "gpus": {"count": NaN}}', id="no number"),
        pytest.param(
            json.dumps({"node_name": "n1", "nics": CREATING, "module_parameters": CREATORS}), id="pairs of keys"
        ),
        pytest.param(json.dumps({"node_name": "n1", "nics": MANY_NAMES}), id="names of several NICs each"),
    ],
)
def test_a_huge_spec_is_refused_with_a_short_message(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SpecError) as caught:
            parse(text)
        # Of the text itself, and of what it is read as.
        assert tracemalloc.get_traced_memory()[1] < 64 * LARGEST_SPEC
    finally:
        tracemalloc.stop()
    assert len(caught.value.faults) <= 33
    assert len(str(caught.value)) < 10_000


def test_a_cut_list_of_faults_says_that_there_are_more() -> None:
    with pytest.raises(SpecError) as caught:
        parse(json.dumps({"node_name": "n1", "nics": [1] * 100}))
    assert caught.value.faults[-1] == "there are more faults; fix these first"


def test_a_spec_that_would_be_too_large_to_be_read_again_is_refused() -> None:
    nics = [
        {
            "name": f"n{nic}",
            "select": {"netdev": f"e{nic}"},
            "altnames": [str(nic * 4096 + name) for name in range(4096)],
        }
        for nic in range(80)
    ]
    text = json.dumps({"node_name": "n1", "nics": nics}, separators=(",", ":"))
    assert len(text) < LARGEST_SPEC
    with pytest.raises(SpecError, match="written as JSON it has more than"):
        parse(text)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "document"
    file.write_text("x" * 10)
    assert read(file, 10) == "x" * 10
    with pytest.raises(ValueError, match="more than the 9 bytes"):
        read(file, 9)
    # Larger than any memory; nobody reads it to the end.
    os.truncate(file, 1 << 40)
    with pytest.raises(ValueError, match="more than the 10 bytes"):
        read(file, 10)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000 + "]" * 5000,
        "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1),
        '{"a": 1, "a": 2}',
        "NaN",
        "Infinity",
        "[-Infinity]",
        "1" * 101,
    ],
)
def test_malformed_documents_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested|twice|not a JSON number|more than"):
        load(text, 5000 if text.startswith("[") else 100)


GOOD = json.loads(report_to_json(Report("n1", "", "boot", "1", True, True)))


@pytest.mark.parametrize(
    "wrong",
    [
        '"uptime": NaN',
        '"uptime": "nan"',
        '"heartbeat": Infinity',
        '"uptime": 1e999',
        f'"time": {10**400}',
        '"uptime": true',
        r'"refusal": "\ud800"',
        r'"conditions": [{"type": "A", "status": "True", "reason": "B", "message": "\udfff"}]',
        '"outcomes": "[[[["',
    ],
)
def test_a_malformed_report_counts_as_none(tmp_path: Path, wrong: str) -> None:
    name = json.loads(wrong.partition(":")[0])
    kept = json.dumps({key: value for key, value in GOOD.items() if key != name})
    (tmp_path / REPORT).write_text(f"{kept[:-1]}, {wrong}}}")
    with pytest.raises(NoReport, match="not a"):
        read_report(tmp_path / REPORT)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / REPORT)
    with pytest.raises(NoReport, match="not a regular file"):
        read_report(tmp_path / REPORT)


def test_a_huge_report_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "report.json").touch()
    os.truncate(tmp_path / "report.json", 1 << 40)
    with pytest.raises(NoReport, match="more than"):
        read_report(tmp_path / REPORT)


@pytest.mark.parametrize("answer", [b"[1]\n", b"5\n", b"[" * 5000 + b"\n", b'"refused"\n', b"\xff\n"])
def test_a_worker_that_sends_nonsense_causes_no_traceback(tmp_path: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.bind(str(tmp_path / NAME))
        connection.listen()

        def serve() -> None:
            client, _ = connection.accept()
            with client:
                client.recv(4096)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ApplyRefused):
            list(ask(tmp_path / NAME, None, 30))
        thread.join()
