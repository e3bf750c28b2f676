"""Earlier operations run again: this fails if an upgrade of pyinfra changes what tasks/common/replay.py relies on."""

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.facts.server import Hostname
from pyinfra.operations import server

from tasks.common.commands import Commands
from tasks.common.replay import earlier_operations
from tests.deploy.conftest import Node


@operation()
def run_again() -> Commands:
    yield from earlier_operations()
    # A fact is read with the arguments of the operation that reads it.
    yield StringCommand("echo", host.get_fact(Hostname))


def code() -> None:
    server.shell(name="First", commands=["first"], _env={"LEVEL": "1"})
    server.shell(name="Second", commands=["second"], _env={"LEVEL": "2"})
    run_again(name="Again", _env={"LEVEL": "3"})
    server.shell(name="After", commands=["after"])


def test_earlier_operations_run_again_in_their_order_with_their_own_arguments(node: Node) -> None:
    result = node.deploy(code, {"uname -n": "node-a"})
    assert not result.failed
    assert result.commands["Again"] == ["first", "second", "echo node-a"]
    assert result.commands["After"] == ["after"]
    levels = [(command.split()[-1], given["_env"]["LEVEL"]) for command, given in result.arguments if given.get("_env")]
    executed = levels[-6:]
    assert executed == [
        ("first", "1"), ("second", "2"),
        ("first", "1"), ("second", "2"), ("-n", "3"), ("node-a", "3"),
    ]  # fmt: skip


def test_an_operation_that_runs_again_does_what_is_needed_at_that_time(node: Node) -> None:
    @operation()
    def name_host() -> Commands:
        if host.get_fact(Hostname) != "new":
            yield StringCommand("hostname", "new")

    def rename() -> None:
        name_host(name="Name")
        run_again(name="Again")

    result = node.deploy(rename, {"uname -n": "new"})
    assert result.commands["Again"] == ["echo new"]
