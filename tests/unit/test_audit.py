"""The audit of pinned versions, with a registry of the test's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tasks.common import audit

HOLE = {"id": "PYSEC-1", "summary": "reads beyond the end", "fixed_in": ["1.1"], "withdrawn": None}
ANSWERS: dict[str, Any] = {
    "/good/1.0/json": {"info": {"version": "1.0"}, "vulnerabilities": []},
    "/bad/1.0/json": {"info": {"version": "1.0"}, "vulnerabilities": [HOLE, {**HOLE, "withdrawn": "2026-01-01"}]},
    "/newest/json": {"info": {"version": "1.0"}, "vulnerabilities": [HOLE]},
    "/old/json": {"info": {"version": "2.0"}, "vulnerabilities": []},
    "/odd/1.0/json": {"info": {"version": "1.0"}},
}


@pytest.fixture
def registry() -> Iterator[str]:
    """A registry; as some mirrors do, it does not serve every version."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = ANSWERS.get(self.path)
            text = json.dumps(answer).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def run(tmp_path: Path, registry: str, *names: str, more: tuple[str, ...] = ()) -> Result:
    lock = tmp_path / "lock.txt"
    lines = (f"{name}==1.0 ; sys_platform == 'linux' \\\n    --hash=sha256:{'0' * 64}\n    # via x\n" for name in names)
    lock.write_text("".join(lines))
    return CliRunner().invoke(audit.main, [str(lock), "--registry", registry, *more])


def test_pins_without_vulnerabilities_exit_0(tmp_path: Path, registry: str) -> None:
    result = run(tmp_path, registry, "good")
    assert (result.exit_code, result.output) == (0, "1 pins, 0 findings\n")


@pytest.mark.parametrize("name", ["bad", "newest"])
def test_a_vulnerability_is_named_with_the_version_without_it(tmp_path: Path, registry: str, name: str) -> None:
    result = run(tmp_path, registry, "good", name)
    assert result.exit_code == 2
    assert f"{name} 1.0: PYSEC-1: reads beyond the end; fixed in 1.1\n2 pins, 1 findings\n" in result.output
    (finding,) = json.loads(run(tmp_path, registry, name, more=("--json",)).output)["findings"]
    assert finding == {"name": name, "version": "1.0", "what": "PYSEC-1", "fixed": ["1.1"]}


def test_a_version_unknown_to_the_registry_is_a_finding(tmp_path: Path, registry: str) -> None:
    result = run(tmp_path, registry, "old", "absent")
    assert result.exit_code == 2
    assert result.output.count("the registry does not have this version") == 2


def test_a_registry_without_such_data_or_out_of_reach_is_one_clear_line(tmp_path: Path, registry: str) -> None:
    odd = run(tmp_path, registry, "odd")
    assert (odd.exit_code, odd.output.count("\n")) == (1, 1)
    assert "has no data on vulnerabilities of odd" in odd.output
    silent = run(tmp_path, "http://127.0.0.1:9", "good")
    assert (silent.exit_code, silent.output.count("\n")) == (1, 1)
    assert "this check needs the network" in silent.output


@pytest.mark.parametrize("text", [b"good\n", b"good>=1.0\n", b"!\n", b"\xff\n"])
def test_a_file_that_is_no_lock_is_one_clear_line(tmp_path: Path, registry: str, text: bytes) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_bytes(text)
    result = CliRunner().invoke(audit.main, [str(lock), "--registry", registry])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert f"Error: {lock} is not a lock file: " in result.output


def test_every_lock_of_the_project_is_read() -> None:
    for lock in Path("requirements").glob("*.txt"):
        assert all(pin.version for pin in audit.pins(lock)) and list(audit.pins(lock))
