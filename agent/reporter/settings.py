"""The reporter's settings for Kubernetes: /etc/trackbed/reporter.json, which the deploy writes. Nothing in it is secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypeVar

from attrs import asdict, field, frozen

from agent.documents import LARGEST_SPEC, load, read
from agent.report.records import from_plain

Record = TypeVar("Record")

IdentityKind = Literal["certificate", "token"]
LiftedBy = Literal["reporter", "node-readiness-controller"]
Role = Literal["fact", "plugin"]

READY_LABEL = "trackbed.internal/ready"
"""The reporter's own label: the value "true" while the node is ready."""

LABELS = Path("/etc/trackbed/labels.json")


@frozen
class Settings:
    """How the node is published.

    ``server``: the API server's URL; ``ca_file``: the PEM file by which it is known.
    ``required_resources``: extended resources that must be allocatable before the taint is lifted.
    ``certificate_days``: how long a certificate is asked for, 1 to 365.
    """

    node_name: str
    server: str
    ca_file: str
    identity: IdentityKind = "certificate"
    required_resources: tuple[str, ...] = ()
    taint_lifted_by: LiftedBy = "reporter"
    certificate_days: int = 365


@frozen
class Label:
    """A label of the node. A ``plugin``'s selects the DaemonSet of a device plugin, which makes ``resource`` allocatable."""

    key: str
    value: str
    role: Role = "fact"
    resource: str | None = None


@frozen
class _Labels:
    labels: tuple[Label, ...] = field(default=())


def to_json(settings: Settings) -> str:
    """The settings file's text."""
    return json.dumps(asdict(settings), indent=2, sort_keys=True) + "\n"


def read_settings(path: Path) -> Settings:
    """Read the file.

    :raises ValueError: it cannot be read, or is no such file; names it.
    """
    return _read(path, Settings)


def read_labels(path: Path) -> tuple[Label, ...]:
    """Read the labels that the deploy has written; none if there is no such file.

    :raises ValueError: it cannot be read, or is no such file; names it.
    """
    return _read(path, _Labels).labels if path.exists() else ()


def _read(path: Path, record: type[Record]) -> Record:
    try:
        return from_plain(load(read(path, LARGEST_SPEC), LARGEST_SPEC), record)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; the deploy writes it") from None
