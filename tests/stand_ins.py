"""Files and programs that stand in for those of a machine."""

from pathlib import Path


def text_file(path: Path, text: str = "") -> None:
    """Make a file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def program(path: Path, text: str = "") -> None:
    """Make a program of the shell, and its folder."""
    text_file(path, f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
