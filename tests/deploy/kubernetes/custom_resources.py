"""The schemas of custom resources: the CRDs of the operators that run them, as their Go modules have them."""

from functools import cache
from typing import Any

import yaml
from attrs import frozen
from jsonschema import Draft4Validator

from tests.deploy.kubernetes import go_modules, kubernetes_api

_OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


@frozen
class Definition:
    """A CRD in a Go module."""

    module: str
    version: str
    path: str


_ARENA = ("github.com/kubeflow/arena", "v0.15.5")
ARENA_TFJOB = Definition(*_ARENA, "arena-artifacts/crds/kubeflow.org_tfjobs.yaml")
ARENA_TRAINING_JOB = Definition(*_ARENA, "arena-artifacts/crds/kai.alibabacloud.com_trainingjobs.yaml")
MPI_JOB = Definition("github.com/kubeflow/mpi-operator", "v0.8.0", "manifests/base/kubeflow.org_mpijobs.yaml")
SPARK_APPLICATION = Definition(
    "github.com/kubeflow/spark-operator/v2", "v2.5.2", "config/crd/bases/sparkoperator.k8s.io_sparkapplications.yaml"
)
TFJOB = Definition("github.com/kubeflow/training-operator", "v1.8.1", "manifests/base/crds/kubeflow.org_tfjobs.yaml")


def faults(document: dict[str, Any], definition: Definition) -> list[str]:
    """What a CRD says against an object."""
    schema = _schema(definition, document["apiVersion"], document["kind"])
    return [f"{error.json_path}: {error.message}" for error in Draft4Validator(schema).iter_errors(document)]


@cache
def _schema(definition: Definition, api_version: str, kind: str) -> dict[str, Any]:
    """The CRD's schema for a version, made strict: the API server drops or refuses fields that it does not have."""
    text = go_modules.file(definition.module, definition.version, definition.path).read_text()
    spec = yaml.load(text, yaml.CSafeLoader)["spec"]  # the safe loader in C: a CRD has up to a megabyte
    assert spec["names"]["kind"] == kind
    group, _, name = api_version.partition("/")
    assert spec["group"] == group
    (version,) = [each for each in spec["versions"] if each["name"] == name and each["served"]]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    _make_strict(schema)
    schema["properties"]["metadata"] = {"$ref": f"#/definitions/{_OBJECT_META}"}
    return {**schema, "definitions": kubernetes_api.definitions()}


def _make_strict(schema: Any) -> None:
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) and "type" in schema:
            schema.setdefault("additionalProperties", False)
        for each in schema.values():
            _make_strict(each)
    elif isinstance(schema, list):
        for each in schema:
            _make_strict(each)
