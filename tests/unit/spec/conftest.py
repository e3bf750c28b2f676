"""The validator of a spec's JSON Schema. Without the jsonschema package its tests are skipped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.spec.schema import schema


@pytest.fixture(scope="session")
def validator() -> Any:
    # Not a module's import: it takes seconds.
    jsonschema = pytest.importorskip("jsonschema")
    # What a program reads is what was printed.
    return jsonschema.Draft202012Validator(json.loads(json.dumps(schema())))
