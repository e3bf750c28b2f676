"""Types of command line options. It is in this folder since the node's commands and the control host's both import it."""

from __future__ import annotations

from collections.abc import Callable

import click


def number(what: str, least: float, most: float) -> Callable[[str | float], float]:
    """Make a type for click: a number from ``least`` to ``most``. Unlike click.FloatRange it refuses "nan"."""

    def convert(value: str | float) -> float:
        try:
            result = float(value)
        except ValueError:
            result = float("nan")
        if least <= result <= most:
            return result
        raise click.BadParameter(f"it is {value!r}; give {what} from {least:g} to {most:.0f}")

    convert.__name__ = what  # --help shows it as the option's value
    return convert


seconds = number("seconds", 0.0, 365 * 86400.0)
"""A timeout. It is at most a year, since some system calls refuse more than some decades."""
