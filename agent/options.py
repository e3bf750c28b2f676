"""Types of command line options that the node's commands and the control host's have in common."""

from __future__ import annotations

from collections.abc import Callable

import click


def number(what: str, least: float, most: float) -> Callable[[str | float], float]:
    """A type for click: a number between two others. Unlike click.FloatRange it refuses "nan"."""

    def convert(value: str | float) -> float:
        try:
            found = float(value)
        except ValueError:
            found = float("nan")
        if least <= found <= most:
            return found
        raise click.BadParameter(f"it is {value!r}; give {what} from {least:g} to {most:.0f}")

    convert.__name__ = what  # what --help shows as the option's value
    return convert


seconds = number("seconds", 0.0, 365 * 86400.0)
"""A time-out: at most a year, since some system calls take no more than some decades."""
