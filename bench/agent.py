"""Runs the agent's worker on a netdev of a benchmark's namespace, as the service runs it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from agent import linux
from agent.engine.contention import Contention
from agent.engine.context import Memory
from agent.engine.originals import ORIGINALS, Originals
from agent.engine.retry import Failures
from agent.service.activity import Activity
from agent.service.apply_socket import Requests
from agent.service.pass_log import PassRecords
from agent.service.spec_in_force import SpecInForce
from agent.service.worker import work
from agent.spec.node import from_mapping, to_json
from bench.namespace import ADDRESS, devices

MTU = 1500
SPEC = {"node_name": "bench", "nics": [{"name": "rail0", "select": {"pci": ADDRESS}, "mtu": MTU}]}


def keep(netdev: str, out: TextIO, wanted: Mapping[str, object] = SPEC) -> None:
    """Keep a netdev as the spec says, until killed. The worker's messages go to ``out``."""
    # On a node /run is in memory, too.
    with (
        devices({ADDRESS: netdev}),
        TemporaryDirectory() as name,
        TemporaryDirectory(dir="/dev/shm") as volatile,
    ):
        folder, run = Path(name), Path(volatile)
        spec = folder / "node.json"
        spec.write_text(to_json(from_mapping(wanted)))
        control, _ = os.pipe()
        in_force, requests = SpecInForce(folder, run), Requests(run / "apply.sock")
        # The benchmark puts the MTU back again and again; the agent must not take that for contention.
        failures = Failures(Contention(limit=0))
        memory, records = (
            Memory(time.monotonic, failures, Originals.load(run / ORIGINALS)),
            PassRecords.kept(folder, run),
        )
        activity = Activity.at(None)
        work(linux.machine(), spec, in_force, memory, records, activity, control, out, requests)
