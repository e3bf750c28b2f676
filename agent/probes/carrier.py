"""Each netdev that should be up has carrier, except VFs whose ``link_state`` is ``disable``."""

from agent.kinds import links, vf_links
from agent.report.records import Condition, Severity, Stage
from agent.report.target import is_vf, vf_index
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

TYPE = "Carrier"
STAGE: Stage = "network"
SEVERITY: Severity = "required"


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if netdevs of required NICs are up without carrier; the message names them."""
    dark = [
        f"{status.link.name} ({target})"
        for address, nic in sorted(want.nics.items())
        if nic.nic.required
        for kind in (links.NAME, vf_links.NAME)
        for target, status in have[kind].get(address, {}).items()
        if status.link is not None and status.link.up and not status.link.carrier and not _held_down(nic, target)
    ]
    if not dark:
        return [Condition(TYPE, "True", "AllConnected")]
    remedy = "check the cable, the switch port and, for a VF, its PF or its representor"
    return [Condition(TYPE, "False", "NoCarrier", f"no carrier on {', '.join(dark)}", remedy=remedy)]


def _held_down(nic: WantedNic, target: str) -> bool:
    return is_vf(target) and nic.vf_wanted(vf_index(target)).link_state == "disable"
