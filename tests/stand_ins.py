"""Programs that stand in for those of a machine."""

from pathlib import Path


def program(path: Path, text: str = "") -> None:
    """Make a program of the shell, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
