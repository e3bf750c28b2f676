"""Reads what the deploy writes for the reporter: its settings for Kubernetes and the node's labels. Neither holds secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypeVar

from attrs import asdict, field, frozen

from agent.documents import LARGEST_SPEC, load, read
from agent.report.records import from_plain

Record = TypeVar("Record")

LiftedBy = Literal["reporter", "node-readiness-controller"]
Role = Literal["fact", "plugin"]

LABELS = Path("/etc/trackbed/labels.json")


@frozen
class Quarantine:
    """How the devices of a bad NIC are tainted for claims of DRA (Kubernetes' dynamic resource allocation).

    ``effect``: NoSchedule, or None to see what a taint would do. ``evict_after``: seconds after which `trackbed fleet sweep`
    may evict the pods that use such a device; None: never.
    """

    effect: Literal["None", "NoSchedule"] = "NoSchedule"
    evict_after: int | None = None


@frozen
class Settings:
    """How the node is published.

    ``server``: the API server's URL. ``ca_file``: its certificate authority, a PEM file.
    ``required_resources``: extended resources that must be allocatable before the taint is lifted.
    ``token_days``: the life of a token that the reporter requests, 1 to 365. ``quarantine`` None: no device is tainted.
    """

    node_name: str
    server: str
    ca_file: str
    required_resources: tuple[str, ...] = ()
    taint_lifted_by: LiftedBy = "reporter"
    token_days: int = 365
    quarantine: Quarantine | None = None


@frozen
class Label:
    """A label of the node. The role ``plugin``: it selects the DaemonSet of a device plugin, which offers ``resource``."""

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

    :raises ValueError: it cannot be read, or has another content; the message names it.
    """
    return _read(path, Settings)


def read_labels(path: Path) -> tuple[Label, ...]:
    """Read the labels that the deploy has written; none if there is no such file.

    :raises ValueError: it cannot be read, or has another content; the message names it.
    """
    return _read(path, _Labels).labels if path.exists() else ()


def _read(path: Path, record: type[Record]) -> Record:
    try:
        return from_plain(load(read(path, LARGEST_SPEC), LARGEST_SPEC), record)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; the deploy writes it") from None
