"""The addresses of a host, within a time limit."""

from __future__ import annotations

import socket
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any


def addresses(host: str, port: int, within: float) -> list[Any]:
    """The addresses of a host, as getaddrinfo(3) gives them.

    That function has no time limit: while no name server answers, it may take minutes. So a thread calls it, and is left alone
    if it takes longer than ``within`` seconds.

    :raises OSError: there is none, or none in time.
    """
    answers: SimpleQueue[list[Any] | OSError] = SimpleQueue()

    def look() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            answers.put(error)

    Thread(target=look, name=f"resolve {host}", daemon=True).start()
    try:
        answer = answers.get(timeout=within)
    except Empty:
        raise OSError(f"no name server answers for {host} in time") from None
    if isinstance(answer, OSError):
        raise answer
    return answer
