"""What the reporter refuses when it starts: unsafe addresses, tokens that no client could send, files that are no sockets."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.__main__ import cli
from agent.reporter.http import guard
from agent.reporter.http.guard import Address, CannotServe, Guard
from agent.reporter.http.server import serve


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ("--listen", "0.0.0.0:9809"),
            "0.0.0.0 can be reached from elsewhere: give --tls-cert, --tls-key, --token-file",
        ),
        (("--listen", "[::]:9809"), "can be reached from elsewhere"),
        (("--listen", "localhost:9809"), "give an IP address and a port"),
        (("--tls-cert", "/nonexistent"), "give both --tls-cert and --tls-key"),
        (("--token-file", "/nonexistent"), "/nonexistent: No such file"),
        (("--token-file", "/dev/null"), "/dev/null: it is not a regular file; check the path"),
        (("--tls-cert", __file__, "--tls-key", __file__), "give a PEM certificate"),
    ],
)
def test_it_refuses_to_serve_in_an_unsafe_way(arguments: tuple[str, ...], why: str) -> None:
    refused = CliRunner().invoke(cli, ["reporter", *arguments])
    assert refused.exit_code == 1
    assert why in refused.output


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"0123456789abcde\n", "a token has 16 characters at least"),
        ("\u00fc".encode() * 16, "all of ASCII"),
        (b"x" * (guard.LONGEST_TOKEN + 1), "it has more than the 4096 bytes that it may have"),
        (b"\xff" * 16, "it is not UTF-8 text"),
    ],
)
def test_a_token_that_no_client_could_send_is_refused(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(CannotServe, match=why):
        Guard.load(Address("127.0.0.1", 0), None, None, tmp_path / "token")


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
            serve(tmp_path / "report.json", Address("127.0.0.1", 0), Guard(), path, lambda _: None)
        assert path.lstat() == before
