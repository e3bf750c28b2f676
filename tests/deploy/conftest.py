"""One node under test, on pyinfra's fake connector. A test gives the answers; commands and uploads are recorded."""

import hashlib
import logging
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from gevent import GreenletExit
from pyinfra.api.command import FileUploadCommand, FunctionCommand
from pyinfra.api.config import Config
from pyinfra.api.connect import connect_all
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.api.operations import run_ops
from pyinfra.api.state import State, StateStage
from pyinfra.connectors.fake import FakeConnector
from pyinfra.connectors.local import LocalConnector
from pyinfra.context import ctx_host, ctx_state

from agent.report.records import Report, report_to_json
from tasks.agent import AgentService, AgentVersions
from tasks.common import archive, failures, lock
from tasks.common.facts import FactBase
from tasks.common.replacements import REPLACEMENTS, found
from tasks.common.status import NodeStatus
from tasks.common.systemd_reload import GpuLosers
from tasks.common.texts import Texts
from tasks.kubernetes.maintenance import Cordoned
from tasks.node_spec import NodePlan
from tasks.packages import NodePython
from tasks.packages.apt_sources import RepositoryEntries
from tasks.packages.dkms import ModuleState
from tasks.packages.signatures import RefusedModules
from tests.deploy.fake import FRAME, ROOT

Answers = dict[str, Any]

NAME = "@fake/node-a"
DEBIAN = {"*-release": ["/etc/os-release", "ID=debian", "NAME=Debian", 'VERSION_ID="12"', "---"]}
ROCKY_9 = {"*-release": ["/etc/os-release", 'ID="rocky"', 'NAME="Rocky Linux"', 'VERSION_ID="9.4"', "---"]}


def of(fact: type[FactBase[Any]], *arguments: str) -> str:
    """The key of the answers to a fact, if need be with its first arguments: how its command ends (FactBase.script)."""
    return " ".join(("'", fact.__name__, *arguments))


PYTHON = of(NodePython)
VERSIONS = of(AgentVersions)
SERVICE = of(AgentService)
STATUS = of(NodeStatus)
PLAN = of(NodePlan)
SOURCES = of(RepositoryEntries)
SIGNATURES = of(RefusedModules)
LOSERS = of(GpuLosers)
# After a test's own answers, of which one may be about a single module: the kernel has no other drivers for NVIDIA's GPUs.
OTHERWISE = {of(ModuleState, "nova_"): "path "}


def status(report: Report) -> Answers:
    """The answers of a node whose agent has just written this report in this boot."""
    return {STATUS: [f"{report.boot_id} {report.uptime}", report_to_json(report).strip()]}


class Connector(FakeConnector):
    """Records uploads, standard input and arguments, which pyinfra's own fake connector does not."""

    def __init__(self, state: State, host: Host) -> None:
        super().__init__(state, host)
        self.uploads: dict[str, bytes] = {}
        self.inputs: list[str] = []
        self.ran: list[tuple[str, dict[str, Any]]] = []

    def run_shell_command(self, command: Any, *positional: Any, **arguments: Any) -> Any:
        frame = FRAME.fullmatch(str(command))
        self.ran.append((frame[2] if frame else str(command), arguments))
        if arguments.get("_stdin"):
            self.inputs.append(arguments["_stdin"])
        return super().run_shell_command(command, *positional, **arguments)

    def put_file(self, filename_or_io: Any, remote_filename: str, *_: Any, **__: Any) -> bool:
        content = Path(filename_or_io).read_bytes() if isinstance(filename_or_io, str) else filename_or_io.getvalue()
        self.uploads[remote_filename] = content.encode() if isinstance(content, str) else content
        return True


class OwnConnector(Connector, LocalConnector):  # type: ignore[misc]  # the fake get_file takes fewer arguments
    """That of a node that deploys itself."""


@define
class Result:
    """What a deploy did. By operation, ``planned``: whether it would change something; ``commands``: what it ran.

    ``arguments``: all shell commands, with those of facts, and pyinfra's arguments of each. ``errors``: what was printed as an
    error, each line with the host's name in brackets before it.
    """

    planned: dict[str, bool]
    commands: dict[str, list[str]]
    uploads: dict[str, bytes]
    inputs: list[str]
    failed: bool
    arguments: list[tuple[str, dict[str, Any]]]
    log: list[str] = field(factory=list)
    errors: list[str] = field(factory=list)

    @property
    def ran(self) -> list[str]:
        """All shell commands, with those of facts."""
        return [command for command, _ in self.arguments]

    @property
    def flat(self) -> list[str]:
        """The commands of all operations, in their order."""
        return [command for commands in self.commands.values() for command in commands]

    @property
    def did_nothing(self) -> bool:
        """Whether all is as it should be: no operation would change anything, and none ran a command."""
        return not self.failed and not self.flat and not any(self.planned.values())

    @property
    def refusal(self) -> str:
        """Why the host failed: its one command, which refuses, or its one error before any command."""
        assert self.failed
        [said] = self.flat or self.errors
        return said


def _say(command: Any) -> str:
    if isinstance(command, FileUploadCommand):
        return f"upload {command.dest}"
    return f"refuse: {command.args[0]}" if isinstance(command, FunctionCommand) else str(command)


ASKED = (
    *("pyinfra.api.host:Host.get_fact", "pyinfra.api.host:Host.run_shell_command"),
    "pyinfra.api.operations:_run_host_op_with_context",
)
"""What is replaced in pyinfra for every test with a node."""


@contextmanager
def replaced(*places: str) -> Iterator[None]:
    """Replace functions of pyinfra as each deploy does."""
    with pytest.MonkeyPatch.context() as patch:
        for place in places:
            owner, name = found(place)
            patch.setattr(owner, name, REPLACEMENTS[place](getattr(owner, name)))
        yield


def state_of(hosts: Iterable[Any], every: Mapping[str, Any] | None = None, /, **groups: Any) -> State:
    """pyinfra's state of an inventory with these hosts, data of all of them, and groups."""
    state = State(Inventory((list(hosts), every or {}), **groups), Config())  # type: ignore[no-untyped-call]
    state.cwd = str(ROOT)
    return state


def prepare(state: State, code: Callable[[], object]) -> None:
    """Connect to all hosts, and run deploy code for each in the first of pyinfra's phases."""
    connect_all(state)
    state.set_stage(StateStage.Prepare)
    for host in state.inventory:
        with ctx_host.use(host), suppress(GreenletExit):
            failures.prepared(state, code)


@contextmanager
def _no_hosts_left() -> Iterator[None]:
    try:
        yield
    except PyinfraError as error:
        if str(error) != "No hosts remaining!":
            raise


@define
class Node:
    """A node. ``answers`` maps a part of a command to its output; the first match counts."""

    caplog: pytest.LogCaptureFixture
    data: dict[str, Any] = field(factory=dict)
    connector: type[Connector] = Connector
    replaced: tuple[str, ...] = ASKED

    def deploy(self, code: Callable[[], object], answers: Answers, later: Answers | None = None, **data: Any) -> Result:
        """Run deploy code in both of pyinfra's phases.

        ``later``: the answers in the second phase, execute. ``data``: keys of the host beside those of the node.
        """
        state = state_of([(NAME, {"node_name": "node-a", **self.data, **data})])
        state.add_callback_handler(Cordoned())  # type: ignore[no-untyped-call]
        host = state.inventory.get_host(NAME)
        connector = host.connector = self.connector(state, host)
        connector.data["fake_responses"] = {**answers, **OTHERWISE}
        self.caplog.clear()
        with self.caplog.at_level(logging.INFO, "pyinfra"), ctx_state.use(state), replaced(*self.replaced):
            with _no_hosts_left():
                prepare(state, code)
            operations = {
                ", ".join(state.op_meta[made].names): state.ops[host][made].operation_meta
                for made in state.get_op_order()  # type: ignore[no-untyped-call]
                if made in state.ops[host]
            }
            planned = {name: bool(meta._maybe_is_change) for name, meta in operations.items()}
            state.set_stage(StateStage.Execute)
            connector.data["fake_responses"] = {**(answers if later is None else later), **OTHERWISE}
            with _no_hosts_left():
                run_ops(state)
        return Result(
            planned,
            {name: [_say(command) for command in meta._commands or []] for name, meta in operations.items()},
            connector.uploads,
            connector.inputs,
            host in state.failed_hosts,
            connector.ran,
            [record.getMessage() for record in self.caplog.records],
            [record.getMessage() for record in self.caplog.records if record.levelno == logging.ERROR],
        )


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Use a new cache for the session, so that the archive is built, once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def unpacked(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent's archive, unpacked as on a node."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive.build("x86_64")) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deploy of a test notes how long it took in the test's folder, and not in the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def no_lock_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run at the same time deploy this machine at the same time."""
    monkeypatch.setenv(lock.STEAL, "1")


@pytest.fixture
def replace() -> Iterator[Callable[..., None]]:
    """Replaces functions of pyinfra as each deploy does, for this test alone."""
    with ExitStack() as until_the_end:
        yield lambda *places: until_the_end.enter_context(replaced(*places))


@pytest.fixture
def node(caplog: pytest.LogCaptureFixture) -> Node:
    return Node(caplog)


def file_answers(path: str, text: str, mode: str = "-rw-r--r--") -> Answers:
    """The answers of pyinfra's facts for a file with this content, and its folder."""
    folder = str(Path(path).parent)
    return {
        f"sha1sum {path}": f"{hashlib.sha1(text.encode()).hexdigest()}  {path}",  # noqa: S324  pyinfra's own choice
        f"test -e {path} &&": text.splitlines(),
        f"test -e {path} ||": _stat(path, mode),
        f"test -e {folder} ||": _stat(folder, "drwxr-xr-x"),
    }


def files(**texts: str) -> Answers:
    """The answer of the fact that reads text files, by path."""
    return {of(Texts): file_lines(texts)}


def file_lines(texts: Mapping[str, str]) -> list[str]:
    """Text files as tasks/common/texts.py has them printed."""
    return [
        line for path, text in texts.items() for line in (f"file {path}", *(f":{each}" for each in text.splitlines()))
    ]


def _stat(path: str, mode: str) -> str:
    return f"user=root group=root mode={mode} atime=1 mtime=1 ctime=1 size=1 '{path}'"
