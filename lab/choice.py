"""A choice that an environment variable makes."""

import os
from collections.abc import Mapping
from typing import TypeVar

from lab.errors import BadInput

T = TypeVar("T")


def chosen(variable: str, choices: Mapping[str, T], what: str) -> T | None:
    """The choice that the variable names; None if it is not set.

    :raises BadInput: it names none of the choices.
    """
    wanted = os.environ.get(variable)
    if not wanted:
        return None
    if wanted not in choices:
        raise BadInput(f"{variable}={wanted}: no such {what}", f"Give {', '.join(choices)}.")
    return choices[wanted]
