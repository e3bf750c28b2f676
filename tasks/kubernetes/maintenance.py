"""Takes a host's Node out of service for a reboot, or a NIC from its pods, and brings it back.

It does so by the code of `trackbed fleet maintain`, over the connections of this deploy.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

import gevent
from attrs import evolve, frozen
from paramiko import SSHException
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State
from pyinfra.context import host

from agent.report.printable import printable
from agent.report.records import Disruption
from tasks.common import answers
from tasks.common.commands import fail, warn
from tasks.common.connection import arguments
from tasks.common.data import host_data, this_host
from tasks.kubernetes import KUBERNETES, kubeconfig_of
from tasks.kubernetes.clusters import shared_kubeconfig

if TYPE_CHECKING:
    from fleet.inventory import CommandResult
    from fleet.maintenance import Maintenance, NodeResult

    Step: TypeAlias = Callable[[Maintenance, str], tuple[NodeResult, str]]

DRAIN_TIMEOUT = 600.0
APPLY_TIMEOUT = 300.0
READY_TIMEOUT = 900.0
"""Seconds, as the command has them by default."""

POLL_INTERVAL = 2.0
"""Seconds between two questions to an API server that does not answer."""


_held: WeakKeyDictionary[Host, str] = WeakKeyDictionary()
"""What a deploy holds of a host's Node: the Node itself, or a NIC; in words."""


class Cordoned(BaseStateCallback):
    """Says of a host that fails whether its Node stays cordoned, or a NIC of it tainted."""

    def operation_host_error(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        """An operation has failed on a host, whose deploy ends here."""
        if host in _held and not state.get_op_data_for_host(host, op_hash).global_arguments["_ignore_errors"]:
            _say_it_stays(host, _held.pop(host), f"the host has failed; mend that and {_ENDS_IT}")


_ENDS_IT = "deploy again, which brings it back"


def _say_it_stays(host: Host, held: str, why: str) -> None:
    name = str(host.data.dict().get("node_name") or host.name)  # type: ignore[no-untyped-call]
    fail(host, f"the Node {name} {held}, and stays so, since {why}; or trackbed fleet maintain {name} --undo")


@atexit.register
def _say_what_stays() -> None:
    """Say it at the end of a deploy that was stopped. pyinfra calls nothing then."""
    for left in sorted(_held, key=str):
        _say_it_stays(left, _held[left], f"the deploy was stopped; {_ENDS_IT}")


def note_cordoned() -> None:
    """Note that a deploy has cordoned the current host's Node, which is to be said if the host's deploy ends early."""
    _held[this_host()] = "was cordoned for a reboot"


def is_member() -> bool:
    """Whether the current host has the key for a cluster. Whether it has joined, only the API server knows."""
    return KUBERNETES.here() is not None


def blockers(force: bool) -> list[str]:
    """Why the current host's Node would not be drained; empty: it would, or the host has not joined its cluster."""
    found: list[str] = []

    def look(maintenance: Maintenance, name: str) -> tuple[NodeResult, str]:
        found.extend(filter(None, [_held_back(maintenance, name), *maintenance.blockers(name)]))
        return "done", ""

    result, why = _act(look, force=force)
    return found if result == "done" else [why]


def is_in_service() -> bool:
    """Whether the Node takes pods, if it is not cordoned."""
    return _act(_if_in_service)[0] == "done"


def take_out(force: bool) -> tuple[NodeResult, str]:
    """Cordon and drain the Node; the result, and its reason. A drain that fails is undone.

    :param force: also evict pods that nothing starts again, and those with local data.
    """

    def drain(maintenance: Maintenance, name: str) -> tuple[NodeResult, str]:
        # A drain takes minutes, in which a person may press Ctrl-C.
        note_cordoned()
        return maintenance.take_out(name)

    result, why = _act(drain, force=force)
    if result != "done":
        # The reason says what became of the Node.
        _held.pop(this_host(), None)
    return result, why


def bring_back(boot_id: str) -> tuple[NodeResult, str]:
    """Wait until the Node is ready in this boot, and uncordon it; the result, and its reason."""

    def unless_undone(maintenance: Maintenance, name: str) -> tuple[NodeResult, str]:
        from fleet.maintenance_record import record_of

        record = record_of(maintenance.api.node(name)[0])
        if record is None or not maintenance.resumes(record):
            host.log(f"{name}: its maintenance was undone by somebody else")
            return "done", ""
        return evolve(maintenance, boot_id=boot_id).bring_back(name)

    # From here on the reason says what becomes of the Node.
    _held.pop(this_host(), None)
    # The API server may be on the rebooted host itself.
    return _act(unless_undone, patience=READY_TIMEOUT)


def give_back() -> tuple[NodeResult, str]:
    """Uncordon the Node, or untaint its NIC, at once."""
    _held.pop(this_host(), None)
    return _act(lambda maintenance, name: maintenance.give_back(name))


def left_nic() -> tuple[str, Disruption] | None:
    """The NIC that an earlier deploy has left in maintenance, with the level of its change; None: none, as far as is known.

    It is to be said if the host's deploy ends early.
    """
    found: list[tuple[str, Disruption]] = []

    def look(maintenance: Maintenance, name: str) -> tuple[NodeResult, str]:
        from fleet.maintenance_record import record_of

        record = record_of(maintenance.api.node(name)[0])
        if record and record.device and maintenance.resumes(record):
            found.append((record.device, Disruption.parse(record.allow)))
            note_nic(record.device)
        return "done", ""

    result, why = _act(look)
    if result != "done" and host.state.is_executing:
        warn(this_host(), f"it is unknown whether an earlier deploy has left a NIC tainted: {why}")
    return found[0] if found else None


def note_nic(nic: str) -> None:
    """Note that a deploy holds a NIC of the current host, which is to be said if the host's deploy ends early."""
    _held[this_host()] = f"has {nic} in maintenance, with its devices tainted"


def why_no_nic(nic: str) -> str:
    """Why the NIC's maintenance cannot begin, as far as that is known before its pods are looked for; empty: it can."""
    said = "the cluster has no such Node"

    def look(maintenance: Maintenance, name: str) -> tuple[NodeResult, str]:
        from fleet import nic_devices

        nonlocal said
        nic_devices.require(maintenance.api)
        said = _held_back(evolve(maintenance, nic=nic), name)
        return "done", ""

    result, why = _act(look)
    return said if result == "done" else why


def change_nic(nic: str, allow: Disruption, force: bool) -> tuple[NodeResult, str]:
    """Take a NIC from its pods, have the node change it, and give it back; the result, and its reason.

    A maintenance of the NIC that an earlier deploy has begun goes on.

    :param force: also end pods that nothing starts again, and those with local data.
    """

    def change(maintenance: Maintenance, name: str) -> tuple[NodeResult, str]:
        # A person may press Ctrl-C meanwhile. In the end the reason says what became of the NIC.
        note_nic(nic)
        result = evolve(maintenance, nic=nic, allow=allow, apply_timeout=APPLY_TIMEOUT).maintain(name)
        _held.pop(this_host(), None)
        return result

    return _act(change, force=force)


def _held_back(maintenance: Maintenance, name: str) -> str:
    """Why a Node's record forbids this maintenance; empty: it does not."""
    from fleet.maintenance_record import not_finished, record_of

    record = record_of(maintenance.api.node(name)[0])
    ours = record is None or (maintenance.resumes(record) and record.device == maintenance.nic)
    return not_finished(name, record) if record and not ours else ""


def _if_in_service(maintenance: Maintenance, name: str) -> tuple[NodeResult, str]:
    from fleet.objects import unready

    reasons = unready(maintenance.api.node(name)[0], maintenance.conditions)
    return "undone" if reasons else "done", "; ".join(reasons)


@frozen
class _ThisHost:
    """The current host, over the deploy's own connection (:class:`fleet.inventory.Hosts`)."""

    words: str = ""

    def run(self, node: str, command: Sequence[str], timeout: float) -> CommandResult:
        """Run a command, with the arguments that the host's data give."""
        from fleet.inventory import CommandResult, last_lines

        this = this_host()
        send = partial(this.run_shell_command, **{**arguments(this), "_timeout": int(timeout)})
        try:
            done, printed, lacks = answers.ask(StringCommand(*map(QuoteString, command)), send)
        except (OSError, EOFError, SSHException) as error:
            return CommandResult(True, str(error) or "the connection to the host was lost")
        said = last_lines(line.line for line in printed.combined_lines)
        return CommandResult(not done, f"its answer has no {lacks}" if lacks else said)


def _act(step: Step, force: bool = False, patience: float = 0.0) -> tuple[NodeResult, str]:
    """Make a step with the current host's Node.

    :param patience: seconds for which an API server that does not answer is asked again.
    """
    # Imported only where they are used, as by tasks/kubernetes/__init__.py: importing the client takes long.
    from fleet.api import Failed, Unavailable

    deadline = monotonic() + patience
    while True:
        try:
            return _act_once(step, force)
        except Failed as error:
            if not isinstance(error, Unavailable) or monotonic() >= deadline:
                return "failed", error.message
        gevent.sleep(POLL_INTERVAL)


def _act_once(step: Step, force: bool) -> tuple[NodeResult, str]:
    """Make a step with the Node. Where the host has none yet, nothing is to be done.

    :raises Failed: the API server does not answer, or cannot be asked.
    """
    from lightkube import ApiError

    from fleet import api
    from fleet.eviction import Rules
    from fleet.maintenance import Maintenance
    from fleet.objects import IN_SERVICE

    key = KUBERNETES.here()
    name = str(host_data().get("node_name") or host.name)
    if key is None:
        return "done", ""
    if shared := shared_kubeconfig(host, KUBERNETES.name):
        return "failed", f"{KUBERNETES.name}.kubeconfig: {name} cannot be maintained: {shared}"
    kubeconfig = kubeconfig_of(key)
    with api.errors(), api.api(Path(kubeconfig) if kubeconfig else None) as made, api.answers(made.client):
        try:
            made.node(name)
        except ApiError as error:
            if api.code(error) != api.ABSENT:
                raise
            return "done", ""
        maintenance = Maintenance(
            api=made,
            hosts=_ThisHost(),
            allow=Disruption.REBOOT,
            rules=Rules(force=force, delete_emptydir_data=force),
            drain_timeout=DRAIN_TIMEOUT,
            apply_timeout=0,
            ready_timeout=READY_TIMEOUT,
            tell=lambda line: host.log(printable(line)),
            resume=True,
            again="deploy again",
            # A Node with changes that wait for a window takes pods, too.
            conditions=IN_SERVICE,
        )
        return step(maintenance, name)
