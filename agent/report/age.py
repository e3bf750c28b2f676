"""Formats durations."""

from __future__ import annotations


def say_age(seconds: float) -> str:
    """A duration in its two largest units, as kubectl prints it."""
    left = int(max(0.0, seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        number, left = divmod(left, length)
        if number or parts:
            parts.append(f"{number}{unit}" if number else "")
    return "".join(parts[:2]) or "0s"
