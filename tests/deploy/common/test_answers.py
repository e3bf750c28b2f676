"""What a node prints before an answer is no part of it, and an answer without its end is not believed."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from pyinfra.connectors.util import CommandOutput, OutputLine
from pyinfra.context import host
from pyinfra.facts.deb import DebPackages
from pyinfra.facts.files import FileContents
from pyinfra.facts.server import Hostname, LinuxDistribution, Which

from tasks import reboot_policy
from tasks.original_state import Recorded
from tasks.packages.dkms import RunningKernel
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import DEBIAN, Connector, Node, of

BOOT = "11111111-2222-3333-4444-555555555555"
ANSWERS = {
    **DEBIAN,
    of(NodeRebootRequests): [BOOT, f"boot {BOOT} kernel arguments are not in effect"],
    "uname -r": "6.1.0-50-amd64",
    "dpkg -l": ["ii  docker-ce 5:27.1.1 amd64 Docker", "ii  gpg 2.2 amd64 gpg"],
    "uname -n": "node-a",
    "command -v ip": "/usr/sbin/ip",
    "cat /etc/conf": ["first", "last"],
}
FACTS: list[tuple[type[Any], dict[str, str]]] = [
    *((RunningKernel, {}), (NodeRebootRequests, {}), (Recorded, {})),
    *((DebPackages, {}), (Hostname, {}), (LinuxDistribution, {})),
    *((Which, {"command": "ip"}), (FileContents, {"path": "/etc/conf"})),
]


class Noisy(Connector):
    """A node whose login shell prints something before and after each command."""

    def run_shell_command(self, *positional: Any, **arguments: Any) -> Any:
        succeeded, output = super().run_shell_command(*positional, **arguments)
        noise = [OutputLine("stdout", "Welcome to node-a")], [OutputLine("stdout", "Bye")]
        return succeeded, CommandOutput([*noise[0], *output.combined_lines, *noise[1]])


class Cut(Connector):
    """A node whose answers lack their last line, although the command has succeeded."""

    def run_shell_command(self, *positional: Any, **arguments: Any) -> Any:
        succeeded, output = super().run_shell_command(*positional, **arguments)
        return succeeded, CommandOutput(output.combined_lines[:-1])


def read(node: Node, connector: type[Connector]) -> tuple[list[Any], list[str]]:
    """What each fact is, and the errors."""
    node.connector = connector
    values: list[Any] = []
    errors: list[str] = []
    for fact, arguments in FACTS:
        result = node.deploy(_reading(fact, arguments, values), ANSWERS)
        errors += result.errors[:1]
    return values, errors


def _reading(fact: type[Any], arguments: dict[str, str], values: list[Any]) -> Callable[[], None]:
    return lambda: values.append(host.get_fact(fact, **arguments))


def test_text_before_and_after_an_answer_is_no_part_of_it(node: Node) -> None:
    quiet = read(node, Connector)
    assert quiet[0][:3] == ["6.1.0-50-amd64", quiet[0][1], None] and not quiet[1]
    assert read(node, Noisy) == quiet


def test_an_answer_without_its_end_fails_the_node_whatever_the_fact(node: Node) -> None:
    values, errors = read(node, Cut)
    assert values == []
    for (fact, _), error in zip(FACTS, errors, strict=True):
        assert f"[@fake/node-a] the node's answer to {fact.__name__} has no end, so none of it is believed" in error


def test_an_answer_that_lacks_everything_fails_the_node(node: Node) -> None:
    class Silent(Connector):
        def run_shell_command(self, *positional: Any, **arguments: Any) -> Any:
            super().run_shell_command(*positional, **arguments)
            return True, CommandOutput([])

    values, errors = read(node, Silent)
    assert values == []
    assert [error.count("has no beginning") for error in errors] == [1] * len(FACTS)


@pytest.mark.parametrize("given", [{}, {"_ignore_errors": True}])
@pytest.mark.parametrize("succeeds", [True, False])
def test_a_command_that_fails_is_no_answer(node: Node, succeeds: bool, given: dict[str, Any]) -> None:
    values: list[Any] = []
    answers = {"uname -r": {"success": succeeds, "stdout": "6.1.0-50-amd64", "stderr": "killed"}}
    result = node.deploy(_reading(RunningKernel, {}, values), answers, **given)
    assert (values, result.failed) == ((["6.1.0-50-amd64"], False) if succeeds else ([], True))


def test_text_before_the_boot_id_is_no_other_boot(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(reboot_policy, "POLL_INTERVAL", 0)
    monkeypatch.setattr("tasks.reboot_policy.time.monotonic", lambda: next(clock))
    node.connector = Noisy
    still = {of(NodeRebootRequests): ANSWERS[of(NodeRebootRequests)], "cat /proc/sys/kernel/random/boot_id": [BOOT]}
    result = node.deploy(reboot_policy.by_policy, still, reboot={"policy": "allow", "timeout": 30})
    assert result.failed
    assert any("did not shut down within 30 s" in line for line in result.errors)
