"""The reporter's client of the API server, over real connections."""

import ssl
from pathlib import Path
from typing import Any

import pytest

from agent.reporter.api import Api, Session, trust
from tests.unit.scripted import api_server


def test_an_authority_without_identifiers_of_keys_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = ssl.create_default_context

    def as_python_3_13_has_it(**options: Any) -> ssl.SSLContext:
        context = default(**options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_python_3_13_has_it)
    with api_server(tmp_path, lambda method, path, body: (200, {"kind": "List"})) as (url, authority):
        session = Session(trust(authority))
        assert Api(url, lambda: session).ask("GET", "/api/v1/nodes") == {"kind": "List"}
