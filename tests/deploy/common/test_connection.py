"""How nodes are connected to."""

import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import gevent.event
import paramiko
import pytest
from pyinfra.api.command import StringCommand
from pyinfra.api.host import Host
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.sshuserclient import client
from pyinfra.connectors.util import CommandOutput, OutputLine, make_unix_command

from tasks.common import archive, connection
from tasks.common.connection import WAKE_S, TransportFactory
from tasks.common.known_hosts import KnownHosts
from tasks.common.replacements import REPLACEMENTS
from tests.deploy.conftest import state_of
from tests.deploy.fake import inventory, pyinfra
from tests.private_namespace import in_namespace
from tests.programs import failure
from tests.stand_ins import program


def test_a_connection_does_not_wait_for_acknowledgements_and_wakes_up_seldom() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        transport = TransportFactory()(client, gss_kex=False)
        assert transport.sock is client
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert client.gettimeout() == WAKE_S


@pytest.mark.parametrize("stays_away", [pytest.param("banner", id="netmiko-1259"), "handshake", "auth"])
def test_a_busy_host_has_longer_for_the_handshake_than_paramiko_gives_it(stays_away: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        transport = TransportFactory()(client, gss_kex=False)
        assert getattr(transport, f"{stays_away}_timeout") == connection.HANDSHAKE_S


def test_a_channel_that_is_not_a_socket_is_used_unchanged() -> None:
    class Bastion:
        timeout = 0.0

        def settimeout(self, seconds: float) -> None:
            self.timeout = seconds

    bastion: Any = Bastion()
    assert TransportFactory()(bastion).sock is bastion
    assert bastion.timeout == WAKE_S


class Node(paramiko.ServerInterface):
    """A server that notes the requests of its client."""

    def __init__(self) -> None:
        self.requests = Queue[str]()

    def check_auth_none(self, username: str) -> int:
        return int(paramiko.common.AUTH_SUCCESSFUL)

    def check_global_request(self, kind: str, msg: object) -> bool:
        self.requests.put(kind)
        return False


def test_a_host_that_loses_power_is_noticed_on_an_idle_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(connection, "WAKE_S", 0.01)
    node = Node()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = socket.create_connection(listener.getsockname())
        ours = TransportFactory()(wire)
        theirs = paramiko.Transport(listener.accept()[0])
    try:
        theirs.add_server_key(paramiko.ECDSAKey.generate())
        theirs.start_server(server=node, event=Event())
        ours.start_client(timeout=60)
        ours.auth_none("root")
        assert node.requests.get(timeout=60).startswith("keepalive")
        assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == connection.GIVEN_UP_S * 1000
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("place", ["home/.ssh/known_hosts", "no/such/folder/keys", "file/known_hosts"])
def test_a_first_connection_needs_no_file_of_host_keys(
    tmp_path: Path, replace: Callable[..., None], caplog: pytest.LogCaptureFixture, place: str
) -> None:
    replace("pyinfra.connectors.sshuserclient.client:append_hostkey")
    (tmp_path / "home").mkdir()
    (tmp_path / "file").write_text("")
    connected: Any = paramiko.SSHClient()
    connected._host_keys_filename = str(tmp_path / place)
    connected._host_keys = KnownHosts((connected._host_keys_filename,))
    key = paramiko.ECDSAKey.generate()
    client.AcceptNewPolicy().missing_host_key(connected, "n1", key)  # type: ignore[no-untyped-call]
    written = tmp_path / place
    if place.startswith("file"):
        assert f"n1: its host key is not noted in {written}: File exists" in caplog.text
        return
    assert written.read_text() == f"n1 {key.get_name()} {key.get_base64()}\n"
    assert written.parent.stat().st_mode & 0o777 == 0o700


def test_every_host_gets_such_a_connection() -> None:
    read = connection.settings(lambda _, __, given: given)
    arguments = connection.PARAMIKO
    own = state_of(["gpu-01", ("gpu-02", {arguments: {"banner_timeout": 9}})]).inventory
    made = [read(None, SSHConnector.data_meta, host.data)[arguments] for host in own]
    assert made == [
        {"transport_factory": TransportFactory()},
        {"transport_factory": TransportFactory(), "banner_timeout": 9},
    ]


LIMIT = "import resource, sys\nprint('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0], file=sys.stderr)\n"


def deployed(folder: Path, hard: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Deploy to 300 hosts by a process that may have 200 open files, and may raise that to ``hard``."""
    made = inventory(folder / "inventory.py", [f"@fake/h{number:03}" for number in range(300)])
    (folder / "limit.py").write_text(LIMIT)
    return subprocess.run(
        [sys.executable, "-m", "pyinfra", "-y", made, folder / "limit.py"],
        cwd=archive.ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard)),
    )  # fmt: skip


def test_a_deploy_may_have_as_many_open_files_as_it_has_hosts(tmp_path: Path) -> None:
    done = deployed(tmp_path, 1000)
    assert done.returncode == 0, done.stderr
    assert "limit 1000\n" in done.stderr
    # Each may be reached through a program, by three pipes.
    assert "limit 1156\n" in deployed(tmp_path, 2000).stderr


def test_too_many_hosts_for_the_hard_limit_are_refused_and_a_shard_of_them_is_not(tmp_path: Path) -> None:
    refused = deployed(tmp_path, 500)
    assert refused.returncode != 0
    assert "300 hosts need 556 open files" in " ".join(refused.stderr.split())
    assert "Connected" not in refused.stderr and "Traceback" not in refused.stderr
    assert deployed(tmp_path, 500, TRACKBED_SHARD="1/2").returncode == 0


SHELL = "from pyinfra.operations import server\nserver.shell(name='Reached', commands=['true'])\n"


def failed(folder: Path, *hosts: tuple[str, dict[str, Any]], path: str = "") -> str:
    """The errors, in one line, of a deploy to hosts that fail. It reaches another host."""
    made = inventory(folder / "inventory.py", [*hosts, "@fake/c"])
    (folder / "shell.py").write_text(SHELL)
    options = ("--fail-percent", "100")
    said = failure(pyinfra("-y", made, folder / "shell.py", *options, PATH=f"{path}:{os.environ['PATH']}"))
    assert "[@fake/c] Success" in said
    return said


def test_a_key_that_cannot_be_used_fails_its_host_only(tmp_path: Path) -> None:
    encrypted, invalid = tmp_path / "encrypted", tmp_path / "invalid"
    paramiko.RSAKey.generate(2048).write_private_key_file(str(encrypted), password=tmp_path.name)
    invalid.write_text("no key")
    # Nothing listens there.
    keys = {"127.0.0.1": encrypted, "127.0.0.2": invalid}
    said = failed(tmp_path, *((name, {"ssh_port": 1, "ssh_key": str(key)}) for name, key in keys.items()))
    assert "[127.0.0.1] the private key is encrypted" in said
    assert f"[127.0.0.2] Invalid private key file: {invalid}" in said


def test_what_no_connection_can_be_made_to_fails_its_host_only(tmp_path: Path) -> None:
    hosts: list[tuple[str, dict[str, Any]]] = [("gpu..example.net", {}), ("b", {"ssh_hostname": "b" * 64})]
    said = failed(tmp_path, *hosts)
    for name, _ in hosts:
        assert f"[{name}] Unicode" in said and f"; see: ssh {name}" in said


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (
            ("gpu-01.invalid", {}),
            "); let the inventory have the name alone (its port is ssh_port), or give ssh_hostname",
        ),
        (("127.0.0.1:22", {}), "); let the inventory have the name alone (its port is ssh_port)"),
        # Nothing listens there.
        (
            ("127.0.0.1", {"ssh_port": 1}),
            "(Unable to connect to port 1 on 127.0.0.1); see whether the host runs, and give its",
        ),
        (("127.0.0.1", {"ssh_key": "/nowhere"}), "No such private key file: /nowhere; correct ssh_key"),
    ],
)
def test_a_host_that_cannot_be_connected_to_is_told_what_to_correct(
    tmp_path: Path, host: tuple[str, dict[str, Any]], said: str
) -> None:
    assert said in failed(tmp_path, host)


def test_a_login_that_is_refused_names_the_keys_of_the_login(tmp_path: Path) -> None:
    class Refusing(Node):
        def check_auth_password(self, username: str, password: str) -> int:
            return int(paramiko.common.AUTH_FAILED)

    assert "(Authentication failed.); correct ssh_user, ssh_key or ssh_password" in refused(tmp_path, Refusing())


NAME_SERVER = """
mount -t tmpfs none /tmp
printf 'nameserver 127.0.0.1\\noptions timeout:2 attempts:1\\n' > /tmp/resolv.conf
mount --bind /tmp/resolv.conf /etc/resolv.conf
ip link set lo up
"""


@in_namespace(NAME_SERVER)
def test_a_name_server_that_does_not_answer_holds_up_no_other_host() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 53))
        # gevent alone looks up ten names at once.
        said = failed(
            Path("/tmp"), *((f"gpu{number}.test", {}) for number in range(11)), ("localhost", {"ssh_port": 1})
        )
    assert said.index("[localhost] ") < said.index("[gpu0.test] ")


def test_what_is_no_ssh_server_fails_its_host_only(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        # The answer waits for whoever connects.
        answering = Thread(target=lambda: server.accept()[0].sendall(b"\xff\r\n"), daemon=True)
        answering.start()
        at = {"ssh_hostname": "127.0.0.1", "ssh_port": server.getsockname()[1]}
        said = failed(tmp_path, ("web", at))
        answering.join(60)
    assert "[web] SSH error (Error reading SSH" in said


ASKS = "sudo asks for a password"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param("sudo-rs: interactive authentication is required", ASKS, id="pyinfra-1499"),
        # sudo-rs of Ubuntu 26.04 calls itself sudo.
        pytest.param("sudo: interactive authentication is required", ASKS, id="ansible-87423"),
        pytest.param("sudo: a password is required", ASKS, id="pyinfra-587"),
        pytest.param("sudo: sorry, you must have a tty to run sudo", "you must have a tty", id="rex-80"),
        ("operator is not in the sudoers file.", "is not in the sudoers"),
        ("sudo: effective uid is not 0, is /usr/bin/sudo on a file system with nosuid?", "effective uid is not 0"),
    ],
)
def test_sudo_that_asks_for_a_password_or_refuses_fails_its_host_only(tmp_path: Path, words: str, said: str) -> None:
    program(tmp_path / "sudo", f"echo '{words}' >&2\nexit 1")
    assert said in failed(tmp_path, ("@local", {"_sudo": True}), path=str(tmp_path))


# What sudo and sudo-rs print if /tmp is mounted noexec.
NOEXEC = """
echo "sudo: unable to run $SUDO_ASKPASS: Permission denied" >&2
echo 'sudo: no password was provided' >&2
echo 'sudo: a password is required' >&2
exit 1
"""
NOEXEC_RS = """
echo "sudo: Failed to run askpass program $SUDO_ASKPASS: Permission denied (os error 13)" >&2
echo 'sudo: Authentication required but not attempted' >&2
exit 1
"""


@pytest.mark.parametrize("sudo", [pytest.param(NOEXEC, id="pyinfra-880"), pytest.param(NOEXEC_RS, id="sudo-rs-1249")])
def test_where_sudo_cannot_run_the_program_with_its_password_the_cause_is_named(tmp_path: Path, sudo: str) -> None:
    program(tmp_path / "sudo", sudo)
    password = {"_sudo": True, "_sudo_password": tmp_path.name}
    assert "/tmp is mounted noexec" in failed(tmp_path, ("@local", password), path=str(tmp_path))


class OneSession(Node):
    """A server with `MaxSessions 1`, as OpenSSH has it (session_open in session.c)."""

    opened = False

    def check_auth_password(self, username: str, password: str) -> int:
        return int(paramiko.common.AUTH_SUCCESSFUL)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        allowed = paramiko.common.OPEN_FAILED_CONNECT_FAILED if self.opened else paramiko.common.OPEN_SUCCEEDED
        self.opened = True
        return int(allowed)


class NoSftp(Node):
    """A server that runs commands and has no sftp, or one whose program is missing."""

    def __init__(self, offered: bool) -> None:
        super().__init__()
        self.offered = offered

    def check_auth_password(self, username: str, password: str) -> int:
        return int(paramiko.common.AUTH_SUCCESSFUL)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.common.OPEN_SUCCEEDED)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        def answer() -> None:
            channel.sendall(subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout)
            channel.send_exit_status(0)
            channel.close()

        Thread(target=answer, daemon=True).start()
        return True

    def check_channel_subsystem_request(self, channel: paramiko.Channel, name: str) -> bool:
        if self.offered:
            channel.shutdown_write()
        return self.offered


def refused(folder: Path, node: Node) -> str:
    """The errors of a deploy to a host whose sshd is this one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            served = paramiko.Transport(listener.accept()[0])
            served.add_server_key(paramiko.ECDSAKey.generate())
            served.start_server(server=node, event=Event())

        Thread(target=serve, daemon=True).start()
        settings = {"ssh_port": listener.getsockname()[1], "ssh_user": "root", "ssh_password": folder.name}
        settings["ssh_known_hosts_file"] = str(folder / "known_hosts")
        return failed(folder, ("127.0.0.1", settings))


def test_a_host_that_allows_one_session_fails_before_it_is_changed(tmp_path: Path) -> None:
    assert "[127.0.0.1] sshd allows only one session" in refused(tmp_path, OneSession())


@pytest.mark.parametrize("offered", [pytest.param(False, id="pyinfra-499"), pytest.param(True, id="devlib-546")])
def test_a_host_without_sftp_fails_before_it_is_changed(tmp_path: Path, offered: bool) -> None:
    assert "[127.0.0.1] sshd offers no sftp" in refused(tmp_path, NoSftp(offered))


class LoginShell:
    """A connector whose commands a program runs as the node's login shell."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def run_shell_command(self, command: StringCommand, **_: bool) -> tuple[bool, CommandOutput]:
        sent = make_unix_command(command).get_raw_value()
        done = subprocess.run([self.program, "-c", sent], capture_output=True, text=True, check=False)
        lines = [OutputLine("stdout", line) for line in done.stdout.splitlines()]
        return done.returncode == 0, CommandOutput(
            lines + [OutputLine("stderr", line) for line in done.stderr.splitlines()]
        )


# As fish 3.6 and tcsh 6.24 do it: fish reads two backslashes in single quotes as one, and csh ends at the first line.
FISH = r"""exec sh -c "$(printf '%s\n' "$2" | sed 's/[\][\]/\\/g')" """
CSH = """echo "Unmatched '''." >&2; exit 1"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('exec sh "$@"', ""),
        ('echo a warning >&2; exec bash "$@"', ""),
        pytest.param(
            'echo Welcome to node-a; exec sh "$@"',
            "adds to the answer of each command: 'Welcome to node-a'; let ~/.bashrc",
            id="pyinfra-727",
        ),
        ('sh "$@"; printf "\\033[2J\\n"', "adds to the answer of each command: '\\\\x1b[2J'; "),
        ("exit 0", "ran no command: it printed nothing"),
        ("echo This account is closed.; exit 1", "ran no command: This account is closed.; see: ssh HOST"),
        (CSH, "ran no command: Unmatched '''.; see: ssh HOST echo test. The login user needs a shell"),
        (FISH, "the login shell changes quoted text: "),
    ],
)
def test_a_login_shell_that_prints_or_is_none_of_posix_fails_its_host(tmp_path: Path, text: str, message: str) -> None:
    program(tmp_path / "shell", text)
    shell: Any = LoginShell(tmp_path / "shell")
    fault = connection.login_fault(shell)
    assert message in fault and bool(message) == bool(fault), fault


def test_a_login_shell_that_hangs_fails_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", 0.1)
    shell: Any = SimpleNamespace(run_shell_command=lambda *_, **__: gevent.event.Event().wait())
    assert "did not answer within 0.1 s" in connection.login_fault(shell)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        pytest.param(OSError("Failure"), True, id="vscode-sftp-43"),
        (OSError("size mismatch in put!  0 != 4096"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (TimeoutError(), False),
    ],
)
def test_an_upload_that_fails_without_a_reason_names_the_full_disk(
    caplog: pytest.LogCaptureFixture, error: OSError, named: bool
) -> None:
    def put_file(host: Host) -> bool:
        raise error

    host = state_of(["gpu-01"]).inventory.get_host("gpu-01")
    with pytest.raises(OSError) as raised:
        REPLACEMENTS["pyinfra.api.host:Host.put_file"](put_file)(host)
    assert raised.value is error
    assert ("df /tmp" in caplog.text) == named
