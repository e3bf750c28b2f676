"""Pull mode: the timer on the fake connector, and the program itself with real signatures."""

from __future__ import annotations

import ast
import io
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from attrs import define
from pyinfra.api.exceptions import DeployError, InventoryError

from tasks import pull
from tasks.common import archive
from tasks.common.archive import ROOT
from tasks.common.commands import script
from tasks.common.systemd_reload import RELOAD
from tasks.packages import NO_PYTHON
from tests.contract.asking import soon
from tests.deploy.conftest import LOSERS, Node, of

PROGRAM = pull.TEMPLATES / "pull.py"
LIBRARIES = f"lib-{sys.version_info.major}.{sys.version_info.minor}-{os.uname().machine}"
STATE = "ActiveEnterTimestamp"


def gpg(home: Path, *words: str) -> None:
    home.mkdir(mode=0o700, exist_ok=True)
    done = subprocess.run(
        ["gpg", "--homedir", home, "--batch", "--quiet", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def make_key(home: Path, keyring: Path) -> None:
    gpg(home, "--passphrase", "", "--quick-gen-key", "fleet@example.net", "ed25519", "sign")
    gpg(home, "--output", str(keyring), "--export")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two key pairs: ours and another's."""
    folder = tmp_path_factory.mktemp("k")
    make_key(folder / "ours", folder / "ours.gpg")
    make_key(folder / "other", folder / "other.gpg")
    yield folder
    for home in ("ours", "other"):
        subprocess.run(["gpgconf", "--homedir", folder / home, "--kill", "all"], check=False)


def data(keys: Path, **more: Any) -> dict[str, Any]:
    return {
        "url": "https://example.net/t.tar.gz",
        "keyring": str(keys / "ours.gpg"),
        "inventory": "inventories/prod.py",
        **more,
    }


def test_the_timer_and_its_files_are_installed(node: Node, keys: Path) -> None:
    node.data = {"pull": data(keys, every=30)}
    result = node.deploy(pull.serve, {})
    settings = json.loads(result.uploads[pull.SETTINGS])
    assert settings == {
        "url": "https://example.net/t.tar.gz",
        "inventory": "inventories/prod.py",
        "host": "@fake/node-a",
    }
    assert result.uploads[pull.KEYRING] == (keys / "ours.gpg").read_bytes()
    timer = result.uploads["/etc/systemd/system/trackbed-pull.timer"].decode()
    assert "OnUnitInactiveSec=30min" in timer
    assert "RandomizedDelaySec=450s" in timer
    service = result.uploads["/etc/systemd/system/trackbed-pull.service"].decode()
    assert "for python in /usr/bin/python3 /usr/bin/python3.11; do" in service
    assert f'echo "{NO_PYTHON}" >&2; exit 1' in service
    assert result.commands["Pull | Timer runs"] == [
        str(script(RELOAD)),
        "systemctl enable trackbed-pull.timer",
        "systemctl restart trackbed-pull.timer",
    ]


def test_a_timer_whose_reload_would_take_gpus_from_containers_waits(node: Node, keys: Path) -> None:
    node.data = {"pull": data(keys, every=30)}
    result = node.deploy(pull.serve, {LOSERS: ["docker-a.scope", "end"]})
    assert result.commands["Pull | Timer runs"] == []
    assert any("deferred: the timer of pull mode: " in line for line in result.log)


def test_without_the_key_there_is_no_timer(node: Node) -> None:
    assert node.deploy(pull.serve, {}).flat == []
    (removed,) = node.deploy(pull.serve, {of(pull.Present): [pull.SETTINGS]}).flat
    assert removed.endswith(" ".join(("sh", pull.TIMER, *pull.PATHS)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": "ftp://x"}, "url: 'ftp://x' is not valid; give a URL"),
        ({"inventory": "/etc/passwd"}, "inventory: '/etc/passwd' is not valid; give it as inventories/prod.py"),
        ({"every": 1}, "every: 1 is out of range; give 5 to 10080 minutes"),
        (
            {"keyring": "nowhere.gpg"},
            "nowhere.gpg is not a file of public keys; make it by `gpg --export KEY > nowhere.gpg`",
        ),
        ({"keyring": "~no-such-user/fleet.gpg"}, "~no-such-user/fleet.gpg is not a file of public keys"),
        ({"keyring": "README.md"}, "README.md is not a file of public keys"),
    ],
)
def test_bad_data_is_refused(node: Node, keys: Path, given: Any, message: str) -> None:
    node.data = {"pull": data(keys, **given)}
    with pytest.raises(DeployError) as caught:
        node.deploy(pull.serve, {})
    assert str(caught.value).startswith("@fake/node-a.pull")
    assert message in str(caught.value)


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
        names = {
            "SETTINGS": self.folder / "pull.json",
            "KEYRING": self.keys / "ours.gpg",
            "STATE": self.folder / "state",
        }
        environment = {**os.environ, **{f"TRACKBED_PULL_{name}": str(path) for name, path in names.items()}}
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
    assert puller.run() == (0, "")
    ran = puller.ran
    assert ran is not None
    assert ran.startswith("-y inventories/local.py deploy.py" + str(puller.folder / "state" / "new-"))
    assert ran.endswith("/tree")


def test_what_a_run_that_was_killed_left_is_removed(puller: Puller) -> None:
    puller.publish(100)
    (puller.folder / "state" / "new-killed").mkdir(parents=True)
    assert puller.run() == (0, "")


def test_a_run_that_is_stopped_removes_what_it_fetched(puller: Puller) -> None:
    archive = puller.publish(100)
    archive.unlink()
    # It never ends.
    os.mkfifo(archive)
    process = puller.start()
    soon(lambda: list((puller.folder / "state").glob("new-*")) or None, "folder")
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert list((puller.folder / "state").glob("new-*")) == []


def test_a_transfer_that_ends_early_is_no_bad_signature(tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"x" * 60)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/t.tar.gz"
        with pytest.raises(SystemExit, match=r"t\.tar\.gz ended after 60 of 100 bytes"):
            runpy.run_path(str(PROGRAM))["fetch"](url, tmp_path / "t")


def test_a_host_name_that_is_none_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"https://host\.\.example\.net/t cannot be fetched"):
        runpy.run_path(str(PROGRAM))["fetch"]("https://host..example.net/t", tmp_path / "t")


def test_an_archive_with_another_signature_is_not_unpacked(puller: Puller) -> None:
    puller.publish(100, signer="other")
    code, message = puller.run()
    assert code == 1
    assert "is not deployed" in message
    assert "ours.gpg has signed it" in message
    assert puller.ran is None


def test_an_archive_changed_after_signing_is_not_unpacked(puller: Puller) -> None:
    archive = puller.publish(100)
    archive.write_bytes(archive.read_bytes()[:-1] + b"x")
    assert puller.run()[0] == 1
    assert puller.ran is None


def test_an_older_archive_is_refused_though_its_signature_is_good(puller: Puller) -> None:
    puller.publish(100)
    assert puller.run()[0] == 0
    assert puller.run()[0] == 0
    assert puller.ran
    puller.publish(99)
    code, message = puller.run()
    assert code == 1
    assert "the archive is older than the last one deployed; build a new one, or remove" in message
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
    assert f"'{puller.folder / name}'; make room and make the folder writable: df {puller.folder}/state" in message


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
            runpy.run_path(str(PROGRAM))["fetch"](f"http://127.0.0.1:{server.getsockname()[1]}/", tmp_path / "archive")
        answering.join()


def test_an_archive_for_other_machines_is_a_one_line_error(puller: Puller) -> None:
    puller.publish(100, libraries="lib-3.10-riscv64")
    code, message = puller.run()
    assert code == 1
    assert (
        f"the archive has no libraries for {LIBRARIES.removeprefix('lib-')}, only for 3.10-riscv64; build it with that --for"
        in message
    )


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\0" + bytes(20)])
def test_a_signed_file_that_is_no_archive_is_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(
        SystemExit, match=r"https://a is signed, but cannot be unpacked: .*; build and sign it again"
    ) as said:
        runpy.run_path(str(PROGRAM))["unpack"](tmp_path / "archive", tmp_path / "tree", "https://a")
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("content", [None, "", "soon", "\ud800".encode(errors="surrogatepass").decode("latin-1")])
def test_an_invalid_time_is_a_one_line_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "ISSUED").write_text(content)
    with pytest.raises(SystemExit, match=r"the file ISSUED does not contain a time \(.*\); https://a"):
        runpy.run_path(str(PROGRAM))["issued"](tmp_path / "ISSUED", "https://a")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "[" * 100_000])
def test_settings_that_cannot_be_read_are_a_one_line_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "pull.json").write_text(content)
    with pytest.raises(SystemExit, match=r"cannot be read: .*; run the deploy from the control host again"):
        runpy.run_path(str(PROGRAM))["settings"](tmp_path / "pull.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; this inventory is for nodes in pull mode"),
        ("{", "cannot be read: JSONDecodeError"),
        ("[]", "deploy this node from its control host again"),
        ('{"host": "node-a"}', "cannot be read: KeyError('inventory')"),
    ],
)
def test_the_node_s_own_inventory_needs_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, message: str
) -> None:
    settings = tmp_path / "pull.json"
    if content is not None:
        settings.write_text(content)
    monkeypatch.setenv("TRACKBED_PULL_SETTINGS", str(settings))
    with pytest.raises(InventoryError) as caught:
        runpy.run_path(str(ROOT / "inventories" / "local.py"))
    assert str(caught.value).startswith(str(settings))
    assert message in str(caught.value)


PUSHED = """
_hosts = [("a.example.net", {"node_name": "a", "x": 1}), ("b.example.net", {})]
first = (_hosts, {"y": "first", "z": "shared"})
second = (["a.example.net", "b.example.net"], {"x": 2})
"""
# In a process of its own: pyinfra's command replaces parts of Python's library when it is imported.
SHOW = """
import json, sys
from pyinfra.api.state import State
from pyinfra.context import ctx_state
from pyinfra_cli.inventory import make_inventory
ctx_state.set(State())
host = make_inventory(sys.argv[1], cwd=".").get_host(sys.argv[2])
print(json.dumps({"node_name": host.name, **host.data.dict()}, sort_keys=True))
"""


@pytest.mark.parametrize("name", ["a.example.net", "b.example.net"])
def test_a_node_has_the_same_data_in_pull_mode_as_from_its_control_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "inventories"
    folder.mkdir()
    (folder / "fleet.py").write_text(PUSHED)
    shutil.copy(ROOT / "inventories/local.py", folder)
    (tmp_path / "group_data").mkdir()
    (tmp_path / "group_data/first.py").write_text("z = 'of the file'\n")
    (tmp_path / "group_data/fleet.py").write_text("w = 'of all hosts'\n")
    settings = tmp_path / "pull.json"
    settings.write_text(json.dumps({"host": name, "inventory": "inventories/fleet.py"}))
    monkeypatch.setenv("TRACKBED_PULL_SETTINGS", str(settings))
    data = [
        json.loads(
            subprocess.run(
                [sys.executable, "-W", "ignore", "-c", SHOW, f"inventories/{file}.py", host],
                cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True,
            ).stdout
        )
        for file, host in (("fleet", name), ("local", "@local"))
    ]  # fmt: skip
    assert data[0] == data[1]
    assert {key: data[0][key] for key in "wyz"} == {"w": "of all hosts", "y": "first", "z": "of the file"}


def test_an_inventory_that_the_archive_lacks_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "pull.json"
    settings.write_text(json.dumps({"host": "a", "inventory": "inventories/absent.py"}))
    monkeypatch.setenv("TRACKBED_PULL_SETTINGS", str(settings))
    with pytest.raises(InventoryError, match=r"inventories/absent\.py is not in this archive"):
        runpy.run_path(str(ROOT / "inventories" / "local.py"))


def test_an_inventory_that_this_project_lacks_is_a_warning(node: Node, keys: Path) -> None:
    node.data = {"pull": data(keys, inventory="inventories/absent.py")}
    log = node.deploy(pull.serve, {}).log
    assert any("inventories/absent.py is not a file of the site" in line for line in log)
    node.data = {"pull": data(keys)}
    assert not any("is not a file of the site" in line for line in node.deploy(pull.serve, {}).log)


@pytest.mark.parametrize("minor", range(10, 15))
def test_the_archive_s_pins_are_those_of_the_node_s_python(minor: int) -> None:
    lines = archive.pins(pull.PINS, "x86_64", f"3.{minor}").splitlines()
    pinned = dict(line.split(" ")[0].split("==") for line in lines)
    assert {"pyinfra", "paramiko", "gevent"} <= pinned.keys()
    assert ("exceptiongroup" in pinned) == (minor == 10)


def test_a_time_of_issue_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(DeployError, match="SOURCE_DATE_EPOCH='yesterday' is not a number"):
        pull.build(tmp_path / "one", (), ROOT)


def test_an_archive_of_the_same_commit_has_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    target = f"3.{sys.version_info.minor}-x86_64"
    for name in ("one", "other"):
        pull.build(tmp_path / name, (target,), ROOT)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    with tarfile.open(tmp_path / "one") as tar:
        names = tar.getnames()
    assert {"ISSUED", "deploy.py", f"lib-{target}/pyinfra/__init__.py"} <= set(names)
    assert not [name for name in names if name.startswith(f"lib-{target}/bin")]


def test_the_archive_has_all_that_a_deploy_imports(tmp_path: Path) -> None:
    for name in pull.CONTENT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path)
    statements = ast.parse((tmp_path / "deploy.py").read_text()).body
    # All imports, and the first statement after them, which checks the keys of all tasks.
    spec = next(number for number, each in enumerate(statements) if isinstance(each, ast.Assign))
    (tmp_path / "begin.py").write_text("\n".join(map(ast.unparse, statements[: spec + 1])))
    (tmp_path / "one.py").write_text('hosts = [("@fake/node1", {"node_name": "node1", "fabric": {"seconds": 3}})]\n')
    # Tests have the project installed. A node has its archive only.
    code = "import runpy, sys; sys.path.remove(sys.argv.pop(1)); runpy.run_module('pyinfra', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), "-y", "one.py", "begin.py"],
        cwd=tmp_path,
        env={**os.environ, "PYINFRA_FAKE_DELAY": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
