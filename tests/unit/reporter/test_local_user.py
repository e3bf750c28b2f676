"""An unprivileged user of the node against what root's agent writes, reads and listens on."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.report import history, published
from agent.report.publisher import Publisher
from agent.report.records import Change, Outcome
from agent.reporter.http import server
from agent.runtime import boot_id, write_atomically
from agent.service import lock
from agent.service.apply_socket import Requests
from tests.unit.reporter.local_user import NOBODY, as_nobody, public_folder

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

OUTCOME = Outcome(Change("vfs", "0000:21:00.0", "count", 4, 5), "applied")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the other user can reach."""
    with public_folder() as made:
        yield made


@pytest.fixture
def theirs(folder: Path) -> Path:
    """A folder that the other user owns."""
    made = folder / "theirs"
    made.mkdir()
    os.chown(made, NOBODY, NOBODY)
    return made


@pytest.fixture
def file_of_root(folder: Path) -> Path:
    """A file of root's that must stay as it is."""
    made = folder / "precious"
    made.write_text("root's")
    made.chmod(0o600)
    return made


def links(folder: Path, target: Path, *names: str) -> Callable[[], None]:
    """Puts links to ``target`` where root is about to write."""

    def make() -> None:
        for name in names:
            (folder / name).symlink_to(target)

    return make


WRITES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a file": (lambda folder: write_atomically(folder / "a", "ours"), (".a.new", "a")),
    "the report": (lambda folder: Publisher(folder, boot_id(), "v"), (".report.json.new", "report.json")),
    "what is published": (lambda folder: published.write(folder / "p", published.Published()), (".p.new", "p")),
    "the history": (lambda folder: history.History(folder).record([OUTCOME], "h", "event"), (history.NAME,)),
    "the lock": (lock.take, (lock.NAME,)),
    "the socket": (lambda folder: Requests(folder / "apply.sock"), ("apply.sock",)),
}


@pytest.mark.parametrize("name", WRITES)
def test_root_writes_through_no_symbolic_link(theirs: Path, file_of_root: Path, name: str) -> None:
    write, names = WRITES[name]
    assert as_nobody(links(theirs, file_of_root, *names)) is None
    try:
        write(theirs)
    except OSError as error:
        assert str(error)
    assert (file_of_root.read_text(), stat.S_IMODE(file_of_root.stat().st_mode)) == ("root's", 0o600)


def test_no_other_user_can_open_a_new_file_before_it_has_its_mode(theirs: Path) -> None:
    # A process that opens the file when it is created can read what is written later.
    made: list[int] = []
    before = os.umask(0)
    try:
        real = os.fchmod

        def seen(descriptor: int, mode: int) -> None:
            made.append(os.fstat(descriptor).st_mode)
            real(descriptor, mode)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fchmod", seen)
            write_atomically(theirs / "secret", "s")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(mode) for mode in made] == [0o600]


def test_only_root_can_use_the_folder_that_is_made_for_the_lock(folder: Path) -> None:
    before = os.umask(0)
    try:
        os.close(lock.take(folder / "run"))
    finally:
        os.umask(before)
    assert as_nobody(lambda: (folder / "run" / "mine").touch()).startswith("PermissionError")


def test_only_root_may_allow_more_disruption_or_take_the_lock(folder: Path) -> None:
    requests = Requests(folder / "apply.sock")
    os.close(lock.take(folder))

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(folder / "apply.sock"))

    assert as_nobody(connect).startswith("PermissionError")
    assert as_nobody(lambda: os.close(lock.take(folder))).startswith("PermissionError")
    assert as_nobody(lambda: (folder / "apply.sock").unlink()).startswith("PermissionError")
    assert not requests.accept()


def test_root_opens_no_file_by_a_link_of_the_reporters(theirs: Path, folder: Path) -> None:
    elsewhere = folder / "published.json"
    assert published.write(elsewhere, published.Published(boot_id="b", generation=7))
    assert published.read(elsewhere) is not None
    assert as_nobody(links(theirs, elsewhere, "published.json")) is None
    assert published.read(theirs / "published.json") is None


SERVED = """
import sys
from pathlib import Path
from agent.reporter.http.address import Address
from agent.reporter.http.server import serve
folder = Path(sys.argv[1])
serve(folder / "report.json", Address("127.0.0.1", 0), folder / "http.sock", lambda port: print(port, flush=True))
"""


def test_a_full_port_does_not_block_the_socket(theirs: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVED, str(theirs)], stdout=subprocess.PIPE, text=True) as reporter:
        assert reporter.stdout is not None
        port = int(reporter.stdout.readline())
        try:
            seen = as_nobody(lambda: _flood_and_ask(port, theirs / "http.sock"))
        finally:
            reporter.kill()
    assert not isinstance(seen, str), seen
    answer, still_open = seen
    assert b" 200 " in answer
    # The answer came although nobody of the flood had been cut off yet, and did not have to wait for that.
    assert still_open == 2 * server.AT_ONCE


def _flood_and_ask(port: int, path: Path) -> tuple[bytes, int]:
    flood = [socket.socket() for _ in range(2 * server.AT_ONCE)]
    for connection in flood:
        connection.connect(("127.0.0.1", port))
    # As many as the flood: in each turn the server accepts one connection from each socket.
    for _ in flood:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            answer = client.recv(4096)
    still_open = 0
    for connection in flood:
        connection.setblocking(False)
        try:
            connection.recv(1)
        except BlockingIOError:
            still_open += 1
        connection.close()
    return answer, still_open
