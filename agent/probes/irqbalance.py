"""irqbalance does what the spec says: it undoes pinned interrupts while it runs."""

from agent.change import Condition
from agent.machine import Machine
from agent.nics import Wanted
from agent.snapshot import Snapshot


def check(machine: Machine, want: Wanted, have: Snapshot) -> list[Condition]:
    """``IrqbalancePolicy``: False while it runs although the policy is ``disabled``."""
    if want.spec.irqs.irqbalance == "disabled" and "irqbalance" in have.processes:
        message = "irqbalance is running and moves interrupts away; stop it: systemctl disable --now irqbalance"
        return [Condition("IrqbalancePolicy", "False", "IrqbalanceRunning", message)]
    return [Condition("IrqbalancePolicy", "True", "PolicyHeld")]
