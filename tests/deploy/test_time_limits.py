"""A host on which something hangs is given up, by name, and the others are deployed."""

import logging
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from gevent.event import Event
from pyinfra.api.command import FileDownloadCommand, FileUploadCommand, FunctionCommand, StringCommand
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.operation import operation
from pyinfra.api.operations import run_ops
from pyinfra.api.state import State, StateStage
from pyinfra.context import ctx_state, host
from pyinfra.facts.server import Hostname

from tasks import time_limits
from tasks.common.commands import Commands
from tests.deploy.conftest import Connector, prepare, state_of


class Stuck(Connector):
    """A node on which whatever contains the word `hangs` never ends."""

    def _hang_at(self, what: object) -> None:
        if "hangs" in str(what) and self.host.name.endswith("stuck"):
            Event().wait()

    def run_shell_command(self, command: Any, *positional: Any, **arguments: Any) -> Any:
        self._hang_at(command)
        return super().run_shell_command(command, *positional, **arguments)

    def put_file(self, filename_or_io: Any, remote_filename: str, *positional: Any, **named: Any) -> bool:
        self._hang_at(remote_filename)
        return super().put_file(filename_or_io, remote_filename, *positional, **named)

    def get_file(self, remote_filename: str, *_: Any, **__: Any) -> bool:
        self._hang_at(remote_filename)
        return True


class Hangs(Hostname):
    def command(self) -> str:
        return "echo hangs"


@operation()
def fact() -> Commands:
    yield StringCommand("before")
    host.get_fact(Hangs)


@operation()
def command() -> Commands:
    yield StringCommand("hangs")


@operation()
def upload() -> Commands:
    yield FileUploadCommand(StringIO("a"), "/hangs", remote_temp_filename="/temp")


@operation()
def download() -> Commands:
    yield FileDownloadCommand("/hangs", StringIO(), remote_temp_filename="/temp")


@operation()
def function() -> Commands:
    yield FunctionCommand(lambda state, host: host.run_shell_command(StringCommand("hangs"))[0], (), {})


@operation()
def after() -> Commands:
    yield StringCommand("after")


HOST = "pyinfra.api.host:Host"


Deploy = Callable[..., tuple[State, dict[str, Stuck]]]


@pytest.fixture
def deploy(replace: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Deploy:
    """Deploy an operation that hangs on `@fake/stuck`, then another one. The result: the state, and each host's connector."""
    monkeypatch.setattr(time_limits, "MARGIN", 0)
    replace(*(f"{HOST}.{name}" for name in ("get_fact", "run_shell_command", "put_file", "get_file")))
    replace("pyinfra.api.operations:_run_host_op_with_context")

    def run(hanging: Any, **limits: int) -> tuple[State, dict[str, Stuck]]:
        def code() -> None:
            if hanging == "prepare":
                host.get_fact(Hangs)
            else:
                hanging(name="hanging")
            after(name="after")

        given = {name: dict.fromkeys(("fact", "command", "build"), limit) for name, limit in limits.items()}
        state = state_of((f"@fake/{name}", {"time_limits": each}) for name, each in given.items())
        with ctx_state.use(state):
            connectors = {}
            for each in state.inventory:
                each.connector = connectors[each.name] = Stuck(state, each)
            prepare(state, code)
            state.set_stage(StateStage.Execute)
            run_ops(state)
        return state, connectors

    return run


@pytest.mark.parametrize("hanging", [fact, command, upload, download, function, "prepare"])
def test_a_host_that_hangs_is_given_up_and_the_other_is_deployed(
    hanging: Any, caplog: pytest.LogCaptureFixture, deploy: Deploy
) -> None:
    with caplog.at_level(logging.INFO, "pyinfra"):
        state, connectors = deploy(hanging, stuck=1, fine=600)
    assert [each.name for each in state.failed_hosts] == ["@fake/stuck"]
    assert "after" in [ran for ran, _ in connectors["@fake/fine"].ran]
    assert "after" not in [ran for ran, _ in connectors["@fake/stuck"].ran]
    asked = " to Hangs" if hanging in (fact, "prepare") else ""
    assert f"[@fake/stuck] no answer{asked} within 1 s" in caplog.text


def test_a_deploy_whose_only_host_hangs_has_no_traceback(capfd: pytest.CaptureFixture[str], deploy: Deploy) -> None:
    with pytest.raises(PyinfraError, match="No hosts remaining"):
        deploy(fact, stuck=1)
    assert "Traceback" not in capfd.readouterr().err
