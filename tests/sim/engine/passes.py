"""A spec of two NICs."""

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
