"""What the reporter refuses when it starts: addresses that other machines can reach, files that are no sockets."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.reporter.http.address import Address, CannotServe
from agent.reporter.http.server import serve
from cli.__main__ import cli


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("0.0.0.0:9809", "other machines can reach 0.0.0.0"),
        ("[::]:9809", "other machines can reach ::"),
        ("192.0.2.1:9809", "other machines can reach 192.0.2.1"),
        *(
            (address, f"{address!r} is not an address")
            for address in (
                "localhost:9809",
                "127.0.0.1:65536",
                "127.0.0.1:-1",
                "127.0.0.1:",
                "127.0.0.1:9_809",
                "[::1]: 80",
            )
        ),
    ],
)
def test_only_this_machine_can_reach_the_reporter(address: str, why: str) -> None:
    refused = CliRunner().invoke(cli, ["reporter", "--listen", address])
    assert refused.exit_code == 1
    assert why in refused.output


@pytest.mark.parametrize("what", ["file", "link", "folder", "listener"])
def test_a_file_that_is_not_a_socket_is_not_replaced(what: str, tmp_path: Path) -> None:
    path, other = tmp_path / "there", socket.socket(socket.AF_UNIX)
    with other:
        if what == "file":
            path.write_text("kept")
        elif what == "link":
            other.bind(str(tmp_path / "left"))
            path.symlink_to(tmp_path / "left")
        elif what == "folder":
            path.mkdir()
        else:
            other.bind(str(path))
            other.listen()
        before = path.lstat()
        with pytest.raises(CannotServe, match=f"cannot listen on {path}: .*; (remove|stop) it, or give another path"):
            serve(tmp_path / "report.json", Address("127.0.0.1", 0), path, lambda _: None)
        assert path.lstat() == before
