"""irqbalance follows the spec's policy. Otherwise it moves interrupts that the agent has pinned."""

from agent.kinds.host import irqbalance
from agent.report.reasons import condition
from agent.report.records import HOST, Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "IrqbalancePolicy"
STAGE: Stage = "device"
SEVERITY: Severity = "required"


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if it runs although the policy is ``disabled``, or runs without Trackbed's script under the policy ``banned``.

    Unknown if the state for the policy ``banned`` could not be read.
    """
    policy = want.spec.irqs.irqbalance
    if policy == "disabled" and irqbalance.PROCESS in have.processes:
        message = "irqbalance runs and moves interrupts away"
        return [condition(TYPE, "IrqbalanceRunning", message)]
    bans: irqbalance.Bans | None = have[irqbalance.NAME].get(HOST)
    if policy == "banned" and bans is None:
        message = f"{irqbalance.LIST} or irqbalance's command line cannot be read; Converged says why"
        return [condition(TYPE, "NotRead", message)]
    if policy == "banned" and bans is not None and not bans.asked:
        message = f"irqbalance runs without --policyscript={irqbalance.SCRIPT} and moves interrupts away"
        return [condition(TYPE, "IrqbalanceUnbanned", message)]
    return [condition(TYPE, "PolicyHeld")]
