"""What Ctrl-C, SIGTERM and SIGHUP do to a deploy: it ends, says what it leaves (atexit), and has an exit code of its own.

pyinfra 3.10 ends with 0 after Ctrl-C, as after a deploy that has done all; by the other signals it ends without a word.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import click


def handle_signals() -> None:
    """Install the handlers. A signal that is ignored stays ignored: nohup has SIGHUP so."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    click.echo(f"--> Stopped by {signal.Signals(number).name}", err=True)
    # The exit code that a shell gives for a command that a signal has ended.
    sys.exit(128 + number)
