"""The program that fetches an archive, checks its signature and deploys it; with real signatures."""

import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from tasks import pull
from tests.contract.asking import soon
from tests.deploy.pull.keys import gpg
from tests.http_server import serving

PROGRAM = pull.TEMPLATES / "pull.py"
LIBRARIES = f"lib-{sys.version_info.major}.{sys.version_info.minor}-{os.uname().machine}"


UNPACK = r"https://a is signed, but cannot be unpacked: .*; build and sign it again"
ISSUED = r"the file ISSUED does not contain a time \(.*\); https://a"
SETTINGS = r"cannot be read: .*; run the deploy from the control host again"


def called(function: str, *arguments: object) -> Any:
    """What a function of the program returns."""
    return runpy.run_path(str(PROGRAM))[function](*arguments)


@define
class Puller:
    """The program, with folders of its own."""

    folder: Path
    keys: Path

    def publish(self, issued: int, signer: str = "ours", libraries: str = LIBRARIES) -> Path:
        archive = self.folder / "t.tar.gz"
        ran = self.folder / "ran"
        files = {
            "ISSUED": f"{issued}\n",
            f"{libraries}/pyinfra/__init__.py": "",
            f"{libraries}/pyinfra/__main__.py": "import os, sys\n"
            f"open({str(ran)!r}, 'w').write(' '.join(sys.argv[1:]) + os.getcwd())\n",
        }
        with tarfile.open(archive, "w:gz") as tar:
            for name, text in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text.encode()))
        archive.with_name("t.tar.gz.sig").unlink(missing_ok=True)
        gpg(self.keys / signer, "--detach-sign", str(archive))
        return archive

    def run(self) -> tuple[int, str]:
        """Its exit code, and its message; never a traceback."""
        process = self.start()
        _, message = process.communicate()
        assert "Traceback" not in message, message
        assert not list((self.folder / "state").glob("new-*"))
        return process.returncode, message

    def start(self) -> subprocess.Popen[str]:
        (self.folder / "pull.json").write_text(json.dumps({"url": f"file://{self.folder}/t.tar.gz"}))
        files = {
            "SETTINGS": self.folder / "pull.json",
            "KEYRING": self.keys / "ours.gpg",
            "STATE": self.folder / "state",
        }
        environment = {**os.environ, **{f"TRACKBED_PULL_{name}": str(path) for name, path in files.items()}}
        return subprocess.Popen([sys.executable, "-I", PROGRAM], env=environment, stderr=subprocess.PIPE, text=True)

    @property
    def ran(self) -> str | None:
        """What pyinfra was run with, and forget it."""
        file = self.folder / "ran"
        if not file.exists():
            return None
        text = file.read_text()
        file.unlink()
        return text


@pytest.fixture
def puller(tmp_path: Path, keys: Path) -> Puller:
    return Puller(tmp_path, keys)


def test_a_signed_archive_is_deployed_from_its_own_folder(puller: Puller) -> None:
    puller.publish(100)
    # Of a run that was killed: `run` asserts that nothing of this kind stays.
    (puller.folder / "state" / "new-killed").mkdir(parents=True)
    assert puller.run() == (0, "")
    ran = puller.ran
    assert ran is not None
    assert ran.startswith("-y inventories/local.py deploy.py" + str(puller.folder / "state" / "new-"))
    assert ran.endswith("/tree")


def test_a_run_that_is_stopped_removes_what_it_fetched(puller: Puller) -> None:
    archive = puller.publish(100)
    archive.unlink()
    # It never ends.
    os.mkfifo(archive)
    process = puller.start()

    def written() -> int | None:
        # Refused until the run reads it.
        with suppress(OSError):
            return os.open(archive, os.O_WRONLY | os.O_NONBLOCK)
        return None

    writer = soon(written, "reader")
    assert list((puller.folder / "state").glob("new-*"))
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    os.close(writer)
    assert list((puller.folder / "state").glob("new-*")) == []


def test_a_transfer_that_ends_early_is_no_bad_signature(tmp_path: Path) -> None:
    ends_early = {"Content-Length": "100", "Connection": "close"}
    said = r"t\.tar\.gz ended after 60 of 100 bytes"
    with serving(lambda request: (200, b"x" * 60), headers=ends_early) as url, pytest.raises(SystemExit, match=said):
        called("fetch", f"{url}/t.tar.gz", tmp_path / "t")


def test_a_host_name_that_is_none_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"https://host\.\.example\.net/t cannot be fetched"):
        called("fetch", "https://host..example.net/t", tmp_path / "t")


@pytest.mark.parametrize(("signer", "changed"), [("other", False), ("ours", True)])
def test_an_archive_with_another_signature_or_changed_after_signing_is_not_unpacked(
    puller: Puller, signer: str, changed: bool
) -> None:
    archive = puller.publish(100, signer=signer)
    if changed:
        archive.write_bytes(archive.read_bytes()[:-1] + b"x")
    code, message = puller.run()
    assert (code, puller.ran) == (1, None)
    assert "is not deployed" in message and "ours.gpg has signed it" in message


def test_an_older_archive_is_refused_though_its_signature_is_good(puller: Puller) -> None:
    puller.publish(100)
    assert puller.run()[0] == 0
    assert puller.run()[0] == 0
    assert puller.ran
    puller.publish(99)
    code, message = puller.run()
    assert code == 1
    assert "archive is older than the last" in message
    assert puller.ran is None


def test_an_archive_whose_signature_is_the_last_ones_is_not_fetched_again(puller: Puller) -> None:
    archive = puller.publish(100)
    assert puller.run()[0] == 0
    archive.unlink()
    assert puller.ran
    assert puller.run() == (0, "")
    assert puller.ran
    archive = puller.publish(101)
    assert puller.run()[0] == 0
    assert (puller.folder / "state" / "archive.tar.gz").read_bytes() == archive.read_bytes()
    # Another signature of the same archive needs the archive itself.
    puller.publish(102).unlink()
    assert "cannot be fetched" in puller.run()[1]


@pytest.mark.parametrize("damaged", ["archive.tar.gz", "archive.tar.gz.sig"])
@pytest.mark.parametrize("content", [None, b"", b"x"])
def test_a_kept_archive_that_is_damaged_is_fetched_again(puller: Puller, damaged: str, content: bytes | None) -> None:
    puller.publish(100)
    assert puller.run()[0] == 0
    if content is None:
        (puller.folder / "state" / damaged).unlink()
    else:
        (puller.folder / "state" / damaged).write_bytes(content)
    assert puller.ran
    assert puller.run() == (0, "")
    assert puller.ran


def test_an_archive_that_cannot_be_fetched_is_a_one_line_error(puller: Puller) -> None:
    code, message = puller.run()
    assert code == 1
    assert f"file://{puller.folder}/t.tar.gz.sig cannot be fetched: " in message


@pytest.mark.parametrize("name", ["state", "state/issued.new"])
def test_a_folder_that_cannot_be_written_is_a_one_line_error(puller: Puller, name: str) -> None:
    puller.publish(100)
    if name == "state":
        (puller.folder / name).write_text("not a folder")
    else:
        (puller.folder / name).mkdir(parents=True)
    code, message = puller.run()
    assert (code, len(message.splitlines()), puller.ran) == (1, 1, None)
    assert f"'{puller.folder / name}'" in message and f"df {puller.folder}/state" in message


def test_a_download_that_is_too_large_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "endless").write_bytes(b"x" * 300_000)
    program = runpy.run_path(str(PROGRAM))
    program["fetch"].__globals__["LIMIT"] = 100_000
    with pytest.raises(SystemExit, match="has more than 100000 bytes; check that it is the archive"):
        program["fetch"](f"file://{tmp_path}/endless", tmp_path / "archive")
    assert (tmp_path / "archive").stat().st_size <= 100_000


def test_an_answer_that_is_not_http_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"220 mail.example.net\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(SystemExit, match="cannot be fetched: 220 mail"):
            called("fetch", f"http://127.0.0.1:{server.getsockname()[1]}/", tmp_path / "archive")
        answering.join()


def test_an_archive_for_other_machines_is_a_one_line_error(puller: Puller) -> None:
    puller.publish(100, libraries="lib-3.10-riscv64")
    code, message = puller.run()
    assert code == 1
    assert f"no libraries for {LIBRARIES.removeprefix('lib-')}, only for 3.10-riscv64" in message


@pytest.mark.parametrize(
    ("function", "content", "message"),
    [
        *(("unpack", content, UNPACK) for content in (b"", b"no archive", b"\x1f\x8b\x08\0" + bytes(20))),
        *(("issued", content, ISSUED) for content in (None, b"", b"soon", b"\xed\xa0\x80")),
        *(("settings", content, SETTINGS) for content in (b"", b"{", b"[]", b"{}", b"[" * 100_000)),
    ],
)
def test_a_file_that_is_not_what_it_is_signed_or_written_as_is_a_one_line_error(
    tmp_path: Path, function: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "ISSUED").write_bytes(content)
    more = {"unpack": (tmp_path / "tree", "https://a"), "issued": ("https://a",), "settings": ()}
    with pytest.raises(SystemExit, match=message) as said:
        called(function, tmp_path / "ISSUED", *more[function])
    assert "\n" not in str(said.value)
