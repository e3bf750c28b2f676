"""Makes text from outside safe to print on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with control characters, escape sequences and marks of writing direction shown as escapes."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
