"""The fleet's client of the Kubernetes API, over a real connection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightkube.resources.core_v1 import Node

from fleet.connection import connect
from fleet.kubeconfig import from_kubeconfig
from tests.unit.reporter.scripted import api_server, check_strictly


def test_an_authority_without_identifiers_of_keys_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_strictly(monkeypatch)
    with api_server(tmp_path, lambda method, path, body: (200, {"metadata": {"name": "n"}})) as (url, authority):
        document = {
            "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority": str(authority)}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(document))
        with connect(from_kubeconfig(file), "test") as client:
            node = client.get(Node, "n")
    assert node.metadata is not None
    assert node.metadata.name == "n"
