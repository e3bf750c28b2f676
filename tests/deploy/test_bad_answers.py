"""A fleet in which each host but a few answers one command with nonsense: every other host is deployed."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.spec.node import spec_hash, to_json
from tasks import node_spec
from tasks.common import archive
from tasks.common.status import SPEC as SPEC_FILE
from tests.deploy.conftest import Answers, Node, Result, file_answers, status
from tests.deploy.test_cli import DATA, REPORT, SETTLED, deployed

GOOD = 20
_LINE = "x" * 99

WRONG: dict[str, Any] = {
    "nothing": [],
    # As tasks/common/facts.py has them read.
    "random bytes": random.Random(1).randbytes(4096).decode(errors="backslashreplace").splitlines(),  # noqa: S311
    "a number": ["42"],
    "a list": ["[1, [2], null]"],
    "an object": ['{"a": {"b": []}}'],
    "10 MB in lines": [_LINE] * 100_000,
    "10 MB in one line": ["x" * 10_000_000],
}
NOISE = "Welcome to node-a"


def settled(name: str) -> Answers:
    """The answers of a node on which a deploy finds nothing to do."""
    spec = node_spec.node_spec({"node_name": name}, name)
    report = evolve(REPORT, node_name=name, spec_hash=spec_hash(spec))
    return {**SETTLED, **status(report), **file_answers(SPEC_FILE, to_json(spec))}


def hosts(file: str) -> list[tuple[str, dict[str, Any]]]:
    """The inventory: good hosts, and one host for each command and each wrong answer.

    :param file: has the commands. A bad host's name has the number of the command that it answers wrong.
    """
    made = [_host(f"good{n}") for n in range(GOOD)]
    for number, command in enumerate(json.loads(Path(file).read_text())):
        right: Any = next((answer for part, answer in SETTLED.items() if part in command), [])
        lines = [right] if isinstance(right, str) else right
        for kind, wrong in {**WRONG, "text before it": [NOISE, *lines]}.items():
            made.append(_host(f"bad-{number}-{kind.replace(' ', '-').lower()}", {command: wrong}))
    return made


def _host(name: str, wrong: Answers | None = None) -> tuple[str, dict[str, Any]]:
    return f"@fake/{name}", {**DATA, "node_name": name, "fake_responses": {**(wrong or {}), **settled(name)}}


@pytest.mark.slow
def test_what_one_host_answers_wrong_fails_no_other(node: Node, tmp_path: Path) -> None:
    code = compile((archive.ROOT / "deploy.py").read_text(), "deploy.py", "exec")
    right: Result = node.deploy(lambda: exec(code, {}), SETTLED, **DATA)  # noqa: S102
    assert not right.failed and not right.flat
    commands = list(dict.fromkeys(right.ran))
    assert len(commands) > 30
    file = tmp_path / "commands.json"
    file.write_text(json.dumps(commands))
    done = deployed(
        tmp_path / "fleet.py",
        f"__import__('tests.deploy.test_bad_answers', fromlist=['hosts']).hosts({str(file)!r})",
        "--json", "-y", "--fail-percent", "100",
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.stdout, done.stderr[-2000:]
    results = json.loads(done.stdout)["results"]
    good = {f"@fake/good{n}" for n in range(GOOD)}
    # A wrong answer may say that a host needs an operation that the other hosts do not need.
    everywhere = [operation for operation in results["operations"] if good <= set(operation["no_change"])]
    assert len(everywhere) >= 9
    for operation in results["operations"]:
        met = {*operation["success"], *operation["error"], *operation["no_change"]}
        assert operation in everywhere or good.isdisjoint(met), operation["name"]
