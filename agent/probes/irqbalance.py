"""irqbalance does what the spec says: it undoes pinned interrupts while it runs."""

from agent.change import Condition, Severity, Stage
from agent.nics import Wanted
from agent.snapshot import Snapshot

TYPE = "IrqbalancePolicy"
STAGE: Stage = "device"
SEVERITY: Severity = "required"


def check(want: Wanted, have: Snapshot) -> list[Condition]:
    """False while it runs although the policy is ``disabled``."""
    if want.spec.irqs.irqbalance == "disabled" and "irqbalance" in have.processes:
        message = "irqbalance is running and moves interrupts away; stop it: systemctl disable --now irqbalance"
        return [Condition(TYPE, "False", "IrqbalanceRunning", message)]
    return [Condition(TYPE, "True", "PolicyHeld")]
