"""Kubernetes' own schema of its API, to hold manifests against: the OpenAPI document of a release, fetched by Go."""

import json
from functools import cache
from typing import Any

from jsonschema import Draft4Validator

from tests.deploy.kubernetes import go_modules

VERSION = "v1.36.3"


@cache
def definitions() -> dict[str, Any]:
    """The schemas of all kinds, made strict: a field that a kind does not have is an error, as it is for the server."""
    path = go_modules.file("k8s.io/kubernetes", VERSION, "api/openapi-spec/swagger.json")
    schemas: dict[str, Any] = json.loads(path.read_text())["definitions"]
    for schema in schemas.values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    # What a quantity, and an int or a string, is in JSON.
    schemas["io.k8s.apimachinery.pkg.api.resource.Quantity"] = {"type": ["string", "number"]}
    schemas["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = {"type": ["string", "integer"]}
    return schemas


def faults(document: dict[str, Any]) -> list[str]:
    """What the API's schema says against an object of a core kind."""
    group, _, version = document["apiVersion"].rpartition("/")
    wanted = {"group": group, "version": version, "kind": document["kind"]}
    names = [name for name, each in definitions().items() if wanted in each.get("x-kubernetes-group-version-kind", ())]
    assert len(names) == 1, f"no kind {wanted}"
    schema = {"$ref": f"#/definitions/{names[0]}", "definitions": definitions()}
    return [f"{error.json_path}: {error.message}" for error in Draft4Validator(schema).iter_errors(document)]
