"""Runs the agent's worker on a netdev of a benchmark's namespace, as the service runs it."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from agent.engine.contention import Contention
from agent.engine.originals import ORIGINALS, Originals
from agent.engine.retry import Failures
from agent.report.activity import Activity
from agent.report.history import History
from agent.service.apply_socket import Requests
from agent.service.spec_in_force import Adopted
from agent.service.worker import work
from agent.spec.node import from_mapping, to_json
from bench.namespace import ADDRESS, devices, machine

MTU = 1500
SPEC = {"node_name": "bench", "nics": [{"name": "rail0", "select": {"pci": ADDRESS}, "mtu": MTU}]}


def keep(netdev: str, out: TextIO) -> None:
    """Keep the MTU of a netdev as the spec says, until killed. The worker's messages go to ``out``."""
    with devices({ADDRESS: netdev}) as root, TemporaryDirectory() as name:
        folder = Path(name)
        spec = folder / "node.json"
        spec.write_text(to_json(from_mapping(SPEC)))
        control, _ = os.pipe()
        adopted, originals = Adopted(folder, folder), Originals.load(folder / ORIGINALS)
        requests, history = Requests(folder / "apply.sock"), History(folder)
        # The benchmark itself changes the value again and again.
        tireless = Failures(Contention(limit=0))
        activity = Activity.at(None)
        work(machine(root), spec, adopted, originals, activity, control, out, requests, history, tireless)
