"""irqbalance follows the policy of the spec; otherwise it moves pinned interrupts."""

from agent.kinds.host import irqbalance
from agent.report.records import HOST, Condition, Severity, Stage
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

TYPE = "IrqbalancePolicy"
STAGE: Stage = "device"
SEVERITY: Severity = "required"


def judge(want: Wanted, have: Snapshot, facts: None) -> list[Condition]:
    """False if it runs although the policy is ``disabled``, or without our script although the policy is ``banned``."""
    policy = want.spec.irqs.irqbalance
    if policy == "disabled" and irqbalance.PROCESS in have.processes:
        message, remedy = (
            "irqbalance is running and moves interrupts away",
            "stop it: systemctl disable --now irqbalance",
        )
        return [Condition(TYPE, "False", "IrqbalanceRunning", message, remedy=remedy)]
    if policy == "banned" and not have[irqbalance.NAME][HOST].asked:
        message = f"irqbalance runs without --policyscript={irqbalance.SCRIPT} and moves interrupts away"
        return [Condition(TYPE, "False", "IrqbalanceUnbanned", message, remedy="run the deploy")]
    return [Condition(TYPE, "True", "PolicyHeld")]
