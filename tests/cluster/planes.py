"""Starts a control plane for tests, stops it at the end, and reads its audit events."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from lab.cluster import control_plane
from lab.cluster.control_plane import ControlPlane

WITH_DEVICE_TAINTS = "v1.37.2"
"""A version of Kubernetes that has DeviceTaintRules as resource.k8s.io/v1, on by default."""


@contextmanager
def running(folder: Path, version: str | None = None) -> Iterator[ControlPlane]:
    """A new control plane without nodes; its files are in ``folder``.

    ``version``: Kubernetes' version, as v1.37.2; None: that of the suite.
    """
    plane = control_plane.create(folder, version=version)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


def received(event: dict[str, Any]) -> float:
    """When the API server received the request of an audit event: seconds since the epoch."""
    return datetime.fromisoformat(event["requestReceivedTimestamp"].replace("Z", "+00:00")).timestamp()
