"""The connections to the nodes: one for each, until the end. So the limit of open files is raised for large fleets.

They are made without Nagle's algorithm (RFC 896), which saves 40 ms for each command.

paramiko sends a command in several small packets. With Nagle's algorithm the kernel holds the second packet back until the
first is acknowledged, and the peer delays its acknowledgement. OpenSSH's client disables the algorithm, too.

While a connection is idle, it wakes up every two seconds. With paramiko's interval of 0.1 s, the connections to 2,000 hosts
wake up 20,000 times a second, which took a third of the deploy's CPU time.

A host may go away without a word, as when it loses its power. To a connection on which nothing is sent this looks like a host
that takes long: the operation would never end, and no other host would begin the next one. So each connection sends something
from time to time, and TCP gives it up when that is not acknowledged. This also keeps firewalls and gateways from forgetting
a connection that waits for other hosts.
"""

from __future__ import annotations

import logging
import re
import resource
import secrets
import socket
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from random import uniform
from threading import local
from typing import Any

import gevent
from attrs import frozen
from gevent import Timeout
from paramiko import ChannelException, SSHException, Transport
from pyinfra import logger
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.exceptions import ConnectError, ConnectorDataTypeError, PyinfraError
from pyinfra.api.host import Host, HostData
from pyinfra.connectors.base import BaseConnector
from pyinfra.connectors.local import LocalConnector
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.context import ctx_host

from agent.report.printable import printable
from tasks.common.known_hosts import configured

OTHER_FILES = 256
"""Files that pyinfra has open beside the connections: its own, and the programs that it starts. It never has so many."""

PIPES = 3
"""Files of a connection through a program (ProxyCommand of the SSH configuration) instead of a socket."""

WAKE_S = 2.0
"""Seconds between two wake-ups of an idle connection, which then looks for the end of the handshake's time limit and for the
interval of `ServerAliveInterval`. A close does not wait for it."""

KEEP_ALIVE_S = 60
"""Seconds without a packet to a host after which one is sent. `ServerAliveInterval` of the SSH configuration overrides it."""

GIVEN_UP_S = 300
"""Seconds for which a host may leave packets unacknowledged: TCP_USER_TIMEOUT (tcp(7)). A host that flaps its link comes back
sooner. Behind a bastion, it is the bastion's TCP that gives the host up, after about 15 minutes (tcp_retries2)."""

ANSWER_S = 60
"""Seconds for the first answer of a login shell. No other host begins the deploy before."""

HANDSHAKE_S = 60
"""Seconds for each part of the handshake: sshd's banner, the keys, the login. paramiko gives up after 15 or 30. A busy host
takes longer, and so does this process with a large fleet."""

TRIES = 5
"""How often a connection is tried if the sshd of the host or of a bastion drops it at once, as beyond MaxStartups."""

NOT_ALLOWED = "Not allowed at this time"
"""What sshd says since OpenSSH 9.8 where it drops a connection: beyond MaxStartups, or for a penalty (PerSourcePenalties) that
lasts 15 s or more. So each wait is then twice as long as the one before."""

DROPPED = re.compile(r"SSH protocol banner(\[Errno 104\].*)?\)$")
"""The end of paramiko's error if a connection is dropped at once."""

SECONDS_BETWEEN = (1.0, 4.0)
"""Seconds between two tries, at random: many hosts may connect through one bastion."""

QUOTED = " 'a' \\\\ !b $c\n`d`"
"""What shells that are not POSIX's change in quoted text: fish drops a backslash, csh ends at the line's end and at `!b`."""

PARAMIKO = "ssh_paramiko_connect_kwargs"
"""The setting of pyinfra with further arguments of paramiko's connect()."""

ONE_SESSION = (
    "sshd allows only one session on a connection, and an upload needs one beside that of the commands: let MaxSessions in "
    "/etc/ssh/sshd_config be 2 or more, or set ssh_file_transfer_protocol to 'scp'"
)

NO_SFTP = (
    "sshd offers no sftp, by which files are uploaded: let /etc/ssh/sshd_config have the line 'Subsystem sftp internal-sftp', "
    "or set ssh_file_transfer_protocol to 'scp'"
)

REMEDIES = {
    "Could not resolve hostname": "let the inventory have the name alone (its port is ssh_port), or give ssh_hostname",
    "Could not connect": "see whether the host runs, and give its ssh_port if that is not 22",
    "Authentication error": "correct ssh_user, ssh_key or ssh_password",
    "No authentication methods available": "give ssh_key, or have ssh-agent hold a key",
    "No such private key file": "correct ssh_key",
    "Invalid private key file": "correct ssh_key, which is the file of a private key",
}
"""What to do, by a part of pyinfra's message about a connection."""

SHOWN = 200
"""Characters of what a login shell prints that are shown."""

BY_CONTROL_HOST = "deploy the node from its control host"
"""The remedy on a node that deploys itself, for what only a control host has."""


def allow_open_files(hosts: int) -> None:
    """Raise this process's limit of open files, often 1024, so far that it suffices for so many hosts.

    :raises PyinfraError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = hosts + OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise PyinfraError(
            f"{hosts} hosts need {needed} open files, and {hard} are allowed: raise the hard limit (LimitNOFILE of a "
            "service, `nofile` in /etc/security/limits.conf), or deploy the hosts in shards (TRACKBED_SHARD=1/4)"
        )
    raised = needed + (PIPES - 1) * hosts
    if hard != resource.RLIM_INFINITY:
        raised = min(raised, hard)
    if soft != resource.RLIM_INFINITY and soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def allow_name_lookups(parallel: int) -> None:
    """Let so many host names be looked up at once; gevent's limit is ten.

    If a name server does not answer, a lookup takes ten seconds or more. Beyond the limit, the other hosts wait for it.
    """
    threads = gevent.get_hub().threadpool
    threads.maxsize = max(threads.maxsize, parallel)


def connecting(connect: Callable[[SSHConnector], None]) -> Callable[[SSHConnector], None]:
    """SSHConnector.connect: whatever keeps a host from being connected to fails this host alone.

    A login shell that prints text, a host without sftp, and one that refuses a second session are refused, too: pyinfra keeps
    the session of sftp until the end. At an exception other than ConnectError, as for an invalid name, pyinfra would end the
    deploy of all hosts.
    """

    # paramiko prints a traceback for what is no SSH server, or a machine that boots. The error comes as an exception, too.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)

    @wraps(connect)
    def connect_or_fail(self: SSHConnector) -> None:
        try:
            # Otherwise gevent's thread for names prints a traceback.
            (self.data["ssh_hostname"] or self.host.name).encode("idna")
            _undropped(connect, self)
            transport: Any = self.client and self.client.get_transport()
            with nullcontext() if self.data["ssh_file_transfer_protocol"] == "scp" else transport.open_session():
                fault = login_fault(self)
            fault = fault or upload_fault(self)
        except ChannelException:
            fault = ONE_SESSION
        except PyinfraError as error:
            # paramiko's error about a port has no number.
            said = str(error).replace("[Errno None] ", "")
            raise ConnectError("; ".join([said, *(do for part, do in REMEDIES.items() if part in said)])) from None
        except Exception as error:
            logger.debug("", exc_info=error)
            raise ConnectError(f"{type(error).__name__}: {error}; see: ssh {self.host.name}") from None
        if fault:
            self.disconnect()
            raise ConnectError(fault)

    return connect_or_fail


def _undropped(connect: Callable[[SSHConnector], None], connector: SSHConnector) -> None:
    for left in reversed(range(TRIES)):
        try:
            connect(connector)
            return
        except ConnectError as error:
            if not DROPPED.search(str(error)):
                raise
            if not left:
                raise ConnectError(
                    f"{error}: sshd, or that of a bastion, closes the connection at once: in its /etc/ssh/sshd_config let "
                    "MaxStartups be larger than --parallel, and PerSourcePenaltyExemptList have the control host's address "
                    "(since OpenSSH 9.8), or see its log"
                ) from None
            longer = 2 ** (TRIES - 1 - left) if NOT_ALLOWED in str(error) else 1
        gevent.sleep(uniform(*SECONDS_BETWEEN) * longer)  # noqa: S311  no secret


_of_host = local()
"""The settings of the host to which a greenlet connects. The connections to its bastions have them, too."""

INHERITED = ("_pyinfra_ssh_strict_host_key_checking", "_pyinfra_ssh_known_hosts_file")


def jumping(connect: Callable[..., None]) -> Callable[..., None]:
    """SSHClient.connect: a bastion (ProxyJump) is connected to as its host is, and through bastions of its own.

    pyinfra asks for each host whether a bastion's new key is right, and connects directly to one that has a ProxyJump itself.
    """

    @wraps(connect)
    def connect_as_host(self: Any, hostname: str, **given: Any) -> None:
        self._configured = configured(hostname, given.get("_pyinfra_ssh_config_file"))
        if (of_host := getattr(_of_host, "settings", None)) is not None:
            # pyinfra gives the first bastion sock=None, which would replace that of the bastion's own ProxyJump.
            if given.get("sock") is None:
                given.pop("sock", None)
            connect(self, hostname, **{**of_host, **given})
            return
        _of_host.settings = {key: given[key] for key in INHERITED if key in given}
        if factory := (given.get("_pyinfra_ssh_paramiko_connect_kwargs") or {}).get("transport_factory"):
            _of_host.settings["transport_factory"] = factory
        try:
            connect(self, hostname, **given)
        finally:
            _of_host.settings = None

    return connect_as_host


def settings(read: Callable[..., Any]) -> Callable[..., Any]:
    """The settings of a connector (host_to_connector_data): None is "not given", and an error names the host.

    A connection by ssh is made by :class:`TransportFactory`, unless the inventory has another one.
    """

    @wraps(read)
    def read_given(kind: Any, known: Any, data: HostData) -> Any:
        given = {key: value for key, value in data.dict().items() if value is not None}  # type: ignore[no-untyped-call]
        own = given.get(PARAMIKO, {})
        if PARAMIKO in known and isinstance(own, dict):
            given[PARAMIKO] = {"transport_factory": TransportFactory(), **own}
        try:
            made = read(kind, known, given)
        except ConnectorDataTypeError as error:
            _, key, said = str(error).split("`", 2)
            raise ConnectorDataTypeError(f"{data.host}.{key}: {said.strip(': ')}; see docs/inventory.md") from None
        # paramiko takes another port for the rest of its division by 65536.
        if not 1 <= (port := made.get("ssh_port") or 22) <= 65535:
            raise ConnectorDataTypeError(f"{data.host}.ssh_port: {port} is out of range; give 1 to 65535")
        return made

    return read_given


def login_fault(connector: BaseConnector) -> str:
    """An error if the login shell does not answer, adds text, or reads commands in another way than sh; else an empty text.

    bash reads ~/.bashrc for the commands of sshd, too. What it prints there is no part of a fact (tasks/common/answers.py), but
    sftp-server, which takes the uploads, cannot bear it.
    """
    mark = f"{secrets.token_hex(8)}{QUOTED}"
    try:
        with Timeout(ANSWER_S, TimeoutError):
            succeeded, output = connector.run_shell_command(
                StringCommand("printf", "'%s\\n'", QuoteString(mark)), print_output=False, print_input=False
            )
    except TimeoutError:
        return f"the login shell did not answer within {ANSWER_S} s; see: ssh HOST echo test"
    wanted = mark.split("\n")
    if succeeded and output.stdout_lines == wanted:
        return ""
    added = printable(" ".join(line for line in output.output_lines if line not in wanted))[:SHOWN]
    if not succeeded or mark[:16] not in output.stdout:
        return (
            f"the login shell ran no command: {added or 'it printed nothing'}; see: ssh HOST echo test. The login user needs "
            "a shell that reads commands as POSIX's sh does, such as bash (chsh -s /bin/bash)"
        )
    if not set(wanted) <= set(output.stdout_lines):
        return (
            f"the login shell changes quoted text: {added!r}; the login user needs a shell that reads commands as POSIX's sh "
            "does, such as bash (chsh -s /bin/bash), and not fish or csh"
        )
    return (
        f"the login shell adds to the answer of each command: {added!r}; "
        "let ~/.bashrc and its like print only in interactive shells (see: ssh HOST true)"
    )


def upload_fault(connector: SSHConnector) -> str:
    """An error if no files can be uploaded; else an empty text. pyinfra itself would find out in the middle of the deploy."""
    try:
        with Timeout(ANSWER_S, TimeoutError):
            connector.get_file_transfer_connection()
    except (ConnectError, TimeoutError):
        return NO_SFTP
    return ""


def deploys_itself(host: Host) -> bool:
    """Whether the deploy runs on the node itself, as in pull mode."""
    return isinstance(host.connector, LocalConnector)


def arguments(host: Host) -> dict[str, Any]:
    """The arguments with which the host's data have a command run (`_sudo`)."""
    with ctx_host.use(host):
        known, _ = pop_global_arguments(host.state, host, {})
    return {key: known[key] for key in CONNECTOR_ARGUMENT_KEYS if key in known}  # type: ignore[literal-required]


class _Transport(Transport):
    """A transport whose error has what the server says instead of its banner."""

    _said = ""

    def _log(self, level: int, msg: Any, *args: Any) -> None:
        self._said = str(msg).partition("Banner: ")[2] or self._said
        super()._log(level, msg, *args)  # type: ignore[misc]

    def _check_banner(self) -> None:
        try:
            super()._check_banner()  # type: ignore[misc]
        except SSHException as error:
            raise SSHException(f"{printable(self._said)[:SHOWN]}: {error}" if self._said else str(error)) from None


@frozen
class TransportFactory:
    """A ``transport_factory`` for paramiko, that each connection by ssh gets."""

    def __call__(self, sock: Any, **settings: Any) -> Transport:
        """Make a transport over a socket, or over paramiko's channel through a bastion."""
        if isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Only Linux has it. Elsewhere TCP's own limits apply.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVEN_UP_S * 1000)
        transport = _Transport(sock, **settings)
        transport.sock.settimeout(WAKE_S)
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = HANDSHAKE_S
        transport.set_keepalive(KEEP_ALIVE_S)
        return transport

    def to_json(self) -> str:
        """The text that `pyinfra INVENTORY debug-inventory` shows."""
        return "without Nagle's algorithm, few wake-ups, kept alive"
