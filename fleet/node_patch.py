"""Writes a Node. A write is tried again if others write the Node meanwhile; a patch, also while the API server restarts."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from time import monotonic, sleep
from typing import Any, TypeVar

import httpx2
from lightkube import ApiError
from lightkube.resources.core_v1 import Node
from lightkube.types import PatchType

from fleet.api import CONFLICTS, NO_LEADER, Api, code
from fleet.connection import TEMPORARY, unreachable
from fleet.objects import version_of

CHECK_INTERVAL = 2.0
"""Seconds between two checks of a node's pods or conditions, and between two tries of a request."""

CLEAN_UP = 30.0
"""Seconds for which a step is tried again once the command is to stop. systemd waits 90 s before it sends SIGKILL."""

TRIES = 5
"""How often a write of a Node is tried while others write that Node, too. The Node is read again before each try."""

T = TypeVar("T")


def past_conflicts(attempt: Callable[[], T]) -> T:
    """Make an attempt that reads a Node and writes it, again if somebody else writes the Node meanwhile."""
    for _ in range(TRIES - 1):
        try:
            return attempt()
        except ApiError as error:
            if code(error) not in CONFLICTS:
                raise
    return attempt()


def if_temporary(error: ApiError | httpx2.TransportError) -> str:
    """Describe an error after which a retry may succeed; raise any other error again."""
    if isinstance(error, ApiError):
        if code(error) not in (*TEMPORARY, NO_LEADER):
            raise error
        return f"the API server answers {code(error)}: {error.status.message}"
    return unreachable(error)


def patch(
    api: Api,
    name: str,
    change: Callable[[Node], tuple[dict[str, Any] | None, T]],
    stop: Event,
    timeout: float,
    check: Callable[[ApiError | httpx2.TransportError], object] = if_temporary,
) -> T:
    """Patch a Node with the first value that ``change`` returns for it; its second is the result.

    A conflict is retried, and so is an API server that cannot be reached or is overloaded, until ``timeout``, or for CLEAN_UP
    seconds once the command is to stop. A patch whose answer was lost may have been made, so ``change`` may see a Node that
    has it.

    :param check: raises an error after which a retry cannot succeed.
    """

    def attempt() -> T:
        node, _ = api.node(name)
        body, result = change(node)
        if body is not None:
            body["metadata"] = {**body.get("metadata", {}), "resourceVersion": version_of(node)}
            api.patch_node(name, body, PatchType.MERGE)
        return result

    stopping = stop.is_set()
    deadline = monotonic() + (CLEAN_UP if stopping else timeout)
    while True:
        try:
            return past_conflicts(attempt)
        except (ApiError, httpx2.TransportError) as error:
            check(error)
            if monotonic() >= deadline:
                raise
            if stopping:
                sleep(CHECK_INTERVAL)
            elif stop.wait(CHECK_INTERVAL):
                stopping, deadline = True, min(deadline, monotonic() + CLEAN_UP)
