"""Starts a control plane for tests, stops it at the end, and reads its audit events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from lab.cluster import control_plane
from lab.cluster.control_plane import ControlPlane


@contextmanager
def running(folder: Path) -> Iterator[ControlPlane]:
    """A new control plane without nodes; its files are in ``folder``."""
    plane = control_plane.create(folder)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


def received(event: dict[str, Any]) -> float:
    """When the API server received the request of an audit event: seconds since the epoch."""
    return datetime.fromisoformat(event["requestReceivedTimestamp"].replace("Z", "+00:00")).timestamp()
