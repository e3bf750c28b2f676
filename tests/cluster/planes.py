"""Starts a control plane for tests, and stops it at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
