"""Kubernetes' own schema of its API, to hold manifests against: the OpenAPI document of a release, fetched by Go."""

from __future__ import annotations

import json
import os
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft4Validator

from lab import go_programs
from lab.command import run

VERSION = "v1.36.3"
MEMBER = f"k8s.io/kubernetes@{VERSION}/api/openapi-spec/swagger.json"

# Kept by version and outside the checkout, whatever cache the session has.
KEPT = Path.home() / ".cache" / "trackbed" / f"kubernetes-openapi-{VERSION}.json"


@cache
def definitions() -> dict[str, Any]:
    """The schemas of all kinds, made strict: a field that a kind does not have is an error, as it is for the server."""
    if not KEPT.exists():
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        fetched = json.loads(run([go_programs.go(), "mod", "download", "-json", f"k8s.io/kubernetes@{VERSION}"]))
        with zipfile.ZipFile(fetched["Zip"]) as opened:
            new = KEPT.with_suffix(f".{os.getpid()}.new")
            new.write_bytes(opened.read(MEMBER))
            new.replace(KEPT)
    found: dict[str, Any] = json.loads(KEPT.read_text())["definitions"]
    for schema in found.values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    # What a quantity, and an int or a string, is in JSON.
    found["io.k8s.apimachinery.pkg.api.resource.Quantity"] = {"type": ["string", "number"]}
    found["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = {"type": ["string", "integer"]}
    return found


def faults(document: dict[str, Any]) -> list[str]:
    """What the API's schema says against an object of a core kind."""
    group, _, version = document["apiVersion"].rpartition("/")
    wanted = {"group": group, "version": version, "kind": document["kind"]}
    names = [name for name, each in definitions().items() if wanted in each.get("x-kubernetes-group-version-kind", ())]
    assert len(names) == 1, f"no kind {wanted}"
    schema = {"$ref": f"#/definitions/{names[0]}", "definitions": definitions()}
    return [f"{error.json_path}: {error.message}" for error in Draft4Validator(schema).iter_errors(document)]
