"""Each netdev that should be up has carrier, except VFs whose ``link_state`` is ``disable``."""

from collections.abc import Iterator, Mapping

from agent.kinds import links, vf_attributes, vf_links
from agent.machine import VfInfo
from agent.probes import Probe
from agent.report.reasons import condition
from agent.report.records import Condition, FunctionFault
from agent.report.target import is_vf, vf_index
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

TYPE = "Carrier"

DARK = "NoCarrier"
HELD = ", which its PF holds down"


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if netdevs of required NICs are up without carrier; the message names them."""
    without = list(_without_carrier(want, have))
    faults = [FunctionFault(target, DARK, f"{name} has no carrier") for _, target, name in without]
    dark = [
        f"{name} ({target}{HELD if _holds_down(have, nic.function.address, target) else ''})"
        for nic, target, name in without
        if nic.nic.required
    ]
    if not dark:
        return [condition(TYPE, "AllConnected", faults=faults)]
    more = '; give the VFs that their PF holds down link_state "auto"' if any(HELD in name for name in dark) else ""
    return [condition(TYPE, DARK, f"no carrier on {', '.join(dark)}", more=more, faults=faults)]


def _without_carrier(want: Wanted, have: Snapshot) -> Iterator[tuple[WantedNic, str, str]]:
    """The NIC, target and name of each netdev that is up without carrier, and should have it."""
    for address, nic in sorted(want.nics.items()):
        for kind in (links.NAME, vf_links.NAME):
            statuses: Mapping[str, links.LinkStatus] = have[kind].get(address, {})
            for target, status in statuses.items():
                link = status.link if status.has_netdev else None
                held_down = is_vf(target) and nic.vf_wanted(vf_index(target)).link_state == "disable"
                if link is not None and link.up and not link.carrier and not held_down:
                    yield nic, target, link.name


def _holds_down(have: Snapshot, address: str, target: str) -> bool:
    """Whether the PF reports that it holds a VF's link down, though the spec does not ask for it.

    A ConnectX VF on InfiniBand may have that policy at first (mlx_to_net_policy, drivers/infiniband/hw/mlx5/ib_virt.c).
    """
    granted: Mapping[int, VfInfo] = have[vf_attributes.NAME].get(address, {})
    vf = granted.get(vf_index(target)) if is_vf(target) else None
    return vf is not None and vf.link_state == "disable"


PROBES = (Probe(name="carrier", type=TYPE, stage="network", judge=judge),)
