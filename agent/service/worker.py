"""The process that does all kernel I/O: it waits for events, runs passes, and sends their results to the supervisor."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TextIO

from attrs import evolve

from agent.engine.context import Memory
from agent.engine.originals import ORIGINALS, Originals
from agent.engine.readiness import Probes
from agent.engine.retry import Failures
from agent.hardware.functions import physical_function
from agent.machine import Machine
from agent.runtime import end_with_parent
from agent.service.activity import Activity
from agent.service.apply_socket import NAME, Requests
from agent.service.inbox import Inbox
from agent.service.loop import Loop
from agent.service.messages import Output
from agent.service.pass_log import PassRecords
from agent.service.spec_in_force import SpecInForce
from agent.service.supervisor import CRASHED, HUNG_WRITES
from agent.service.traced_machine import traced


def work(
    machine: Machine,
    path: Path,
    in_force: SpecInForce,
    memory: Memory,
    records: PassRecords,
    activity: Activity,
    control: int,
    out: TextIO,
    requests: Requests,
    wait_until_published: Callable[[str], str] = lambda announcement: "",
    run: Path | None = None,
) -> None:
    """Keep the spec in the file ``path`` true until ``control`` is closed.

    :param out: where the messages to the supervisor are written.
    :param wait_until_published: as :func:`agent.report.published.wait_until_not_ready` for an announcement.
    :param run: the folder in which probes keep what a restart must not lose; None: they forget it.
    """
    probes = Probes(machine, run)
    output = Output(out)
    inbox = Inbox(
        machine.events.subscribe(),
        activity,
        lambda: output.write({"checking": True}),
        control,
        probes,
        requests.fileno(),
    )
    inbox.reload = True  # the spec has not been read yet
    loop = Loop(
        traced(machine, activity),
        path,
        in_force,
        memory,
        records,
        activity,
        probes,
        inbox,
        output,
        requests,
        wait_until_published,
    )
    output.write({"serving": True})
    try:
        loop.run()
    finally:
        inbox.close()


def main(
    machine: Machine,
    path: Path,
    run: Path,
    state: Path,
    hung: Collection[str],
    activity_fd: int | None,
    wait_until_published: Callable[[str], str] = lambda announcement: "",
) -> None:
    """Serve the supervisor at the other end of standard input and output.

    :param run: the folder for files that a boot removes; ``state``: the folder for files that outlive a boot.
    :param hung: PCI addresses of functions that hung. Their PFs are left alone, with all VFs.
    :param activity_fd: the memory that the supervisor has made for :class:`Activity`.
    :param wait_until_published: as in :func:`work`.
    """
    end_with_parent()
    control = os.dup(sys.stdin.fileno())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not write between the messages
    activity = Activity.at(activity_fd)
    devices = frozenset(physical_function(machine.files, address) for address in hung)
    machine = evolve(machine, hung=devices)
    try:
        writes = {
            physical_function(machine.files, device) if device else "": why
            for device, why in json.loads(os.environ.get(HUNG_WRITES, "{}")).items()
        }
        in_force = SpecInForce(state, run, crashed=os.environ.get(CRASHED), hung_writes=writes)
        memory = Memory(time.monotonic, Failures(), Originals.load(run / ORIGINALS))
        records, requests = PassRecords.kept(state, run), Requests(run / NAME)
        work(machine, path, in_force, memory, records, activity, control, out, requests, wait_until_published, run)
    except BrokenPipeError:
        sys.exit(1)
