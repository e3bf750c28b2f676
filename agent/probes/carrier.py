"""Each netdev that should be up has carrier, except VFs whose ``link_state`` is ``disable``."""

from collections.abc import Mapping

from agent.kinds import links, vf_attributes, vf_links
from agent.machine import VfInfo
from agent.report.reasons import condition
from agent.report.records import Condition, Severity, Stage
from agent.report.target import is_vf, vf_index
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

TYPE = "Carrier"
STAGE: Stage = "network"
SEVERITY: Severity = "required"

HELD = ", which its PF holds down"


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if netdevs of required NICs are up without carrier; the message names them."""
    dark = [
        f"{status.link.name} ({target}{HELD if _holds_down(have, address, target) else ''})"
        for address, nic in sorted(want.nics.items())
        if nic.nic.required
        for kind in (links.NAME, vf_links.NAME)
        for target, status in have[kind].get(address, {}).items()
        if status.has_netdev
        and status.link is not None
        and status.link.up
        and not status.link.carrier
        and not _held_down(nic, target)
    ]
    if not dark:
        return [condition(TYPE, "AllConnected")]
    more = '; give the VFs that their PF holds down link_state "auto"' if any(HELD in name for name in dark) else ""
    return [condition(TYPE, "NoCarrier", f"no carrier on {', '.join(dark)}", more=more)]


def _holds_down(have: Snapshot, address: str, target: str) -> bool:
    """Whether the PF reports that it holds a VF's link down, though the spec does not ask for it.

    A ConnectX VF on InfiniBand may have that policy at first (mlx_to_net_policy, drivers/infiniband/hw/mlx5/ib_virt.c).
    """
    granted: Mapping[int, VfInfo] = have[vf_attributes.NAME].get(address, {})
    vf = granted.get(vf_index(target)) if is_vf(target) else None
    return vf is not None and vf.link_state == "disable"


def _held_down(nic: WantedNic, target: str) -> bool:
    return is_vf(target) and nic.vf_wanted(vf_index(target)).link_state == "disable"
