"""Connects the terminal to a node's serial console."""

import os
import select
import socket
import sys
import termios
import tty
from pathlib import Path

from lab.errors import LabError
from lab.progress import say

DETACH = b"\x1d"


def attach(path: Path) -> None:
    """Connect terminal and console until Ctrl-] is typed or the node is switched off."""
    if not sys.stdin.isatty():
        raise LabError("the console needs a terminal", "`python -m lab ssh` runs commands without one.")
    with socket.socket(socket.AF_UNIX) as console:
        try:
            console.connect(str(path))
        except OSError as error:
            raise LabError(
                f"no console at {path}: {error}", "`python -m lab status` says whether the node is on."
            ) from None
        say("attached; Ctrl-] detaches, Enter shows a prompt")
        before = termios.tcgetattr(sys.stdin)
        tty.setraw(sys.stdin)
        try:
            _join(console)
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
            say("\ndetached")


def _join(console: socket.socket) -> None:
    keyboard, screen = sys.stdin.fileno(), sys.stdout.fileno()
    while True:
        ready, _, _ = select.select([keyboard, console], [], [])
        if keyboard in ready:
            typed = os.read(keyboard, 4096)
            if not typed or DETACH in typed:
                return
            console.sendall(typed)
        if console in ready:
            received = console.recv(65536)
            if not received:
                return
            os.write(screen, received)
