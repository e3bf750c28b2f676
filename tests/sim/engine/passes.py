"""A spec of two NICs, and passes that make a machine match a spec."""

from __future__ import annotations

from agent.engine.context import Goal, Memory
from agent.engine.converge import Pass, converge
from agent.engine.retry import Failures
from agent.machine import Machine
from agent.spec.node import NodeSpec, from_mapping
from tests.sim.two_nics import MAC0, PF1


def spec(count: int = 7, **more: object) -> NodeSpec:
    """Two NICs with VFs, most of them alike."""
    vfs = {"count": count, "defaults": {"trust": True}, "groups": [{"index": "2", "vlan": 100, "spoofchk": False}]}
    nics = [
        {"name": "rail0", "select": {"mac": MAC0}, "mtu": 9000, "vfs": vfs},
        {"name": "rail1", "select": {"pci": PF1}, "vfs": {"count": 2}},
    ]
    return from_mapping({"node_name": "n1", "nics": nics, **more})


def settle(machine: Machine, wanted: NodeSpec, last: Pass | None = None, failures: Failures | None = None) -> Pass:
    """A pass that follows ``last``."""
    return converge(machine, Goal(wanted), Memory(lambda: 0.0, failures or Failures()), last.have if last else None)
