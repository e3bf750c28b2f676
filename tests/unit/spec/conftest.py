"""The validator of a spec's JSON Schema. Without the jsonschema package, the tests that use it are skipped."""

import json
from typing import Any

import pytest

from cli.schema import schema


def made_validator() -> Any:
    # Imported here, since the import takes seconds and few tests need it.
    jsonschema = pytest.importorskip("jsonschema")
    # Through JSON, as other programs read the schema.
    return jsonschema.Draft202012Validator(json.loads(json.dumps(schema())))


@pytest.fixture(scope="session")
def validator() -> Any:
    return made_validator()
