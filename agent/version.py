"""Which agent this is."""

from pathlib import Path

UNRELEASED = "unreleased"


def version() -> str:
    """The version that the archive's VERSION file names; the sources themselves have none."""
    try:
        return (Path(__file__).parent.parent / "VERSION").read_text().strip()
    except FileNotFoundError:
        return UNRELEASED
