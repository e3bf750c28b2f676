"""Secrets are planted wherever the deploy can get one, and looked for in all that it runs, writes and logs."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from tasks import kubernetes
from tasks.drivers import erdma
from tests.deploy.conftest import DEBIAN, Node, files
from tests.deploy.kubernetes.test_kubernetes import CREDENTIALS, OPERATORS, SPEC, cluster_at
from tests.unit.reporter.scripted import token_of

MINTED = token_of("node-a")


def answer(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    """An API server that gives tokens."""
    if path.endswith("/token"):
        return 201, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []},
                     "status": {"token": MINTED, "expirationTimestamp": "2030-01-01T00:00:00Z"}}  # fmt: skip
    return 200, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a", "uid": "u1"}}


def test_a_token_is_only_in_standard_input(node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with cluster_at(tmp_path, answer) as key:
        result = evolve(node, data={"kubernetes": key}).deploy(
            lambda: kubernetes.configure(spec=SPEC), {**DEBIAN, CREDENTIALS: ["brought "]}
        )
    assert not result.failed, result.log
    assert result.inputs == [MINTED]
    seen = "\n".join([*result.ran, *result.flat, *result.log, caplog.text, *os.environ.values()])
    written = b"\n".join(result.uploads.values()).decode()
    arguments = repr([{k: v for k, v in given.items() if k != "_stdin"} for _, given in result.arguments])
    for secret in (MINTED, MINTED.rpartition(".")[2], OPERATORS):
        assert secret not in seen + written + arguments


def test_a_new_token_and_the_restart_that_reads_it_are_one_command(node: Node, tmp_path: Path) -> None:
    """After a deploy that was interrupted in between, the next one would see the new token, and not restart the reporter."""
    with cluster_at(tmp_path, answer) as key:
        renews = evolve(node, data={"kubernetes": key})
        has = {**DEBIAN, CREDENTIALS: ["brought "]}
        first = renews.deploy(lambda: kubernetes.configure(spec=SPEC), has).uploads
        made = {path.replace("/.", "/").removesuffix(".new"): text.decode() for path, text in first.items()}
        written = renews.deploy(lambda: kubernetes.configure(spec=SPEC), {**has, **files(**made)})
    assert not written.failed, written.log
    (command,) = [command for command in written.flat if kubernetes.SECRET in command]
    assert command.endswith(f" sh {kubernetes.SECRET} {kubernetes.STATE_FOLDER} {kubernetes.UNIT}")
    assert "systemctl try-restart" in command
    assert written.inputs == [MINTED]


def test_a_url_with_an_at_sign_in_its_path_has_no_password() -> None:
    """refused.txt has URLs with one: it would be in arguments on the node, and in files that everybody there can read."""
    assert erdma.Installer("https://mirror.example.net/a@b?c=d@e", "0" * 64).url
