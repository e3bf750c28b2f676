"""irqbalance: it would move the interrupts that the agent has placed."""

from __future__ import annotations

from pyinfra.operations import systemd

from agent.spec import IrqbalancePolicy, Mode


def policy(wanted: IrqbalancePolicy, mode: Mode = "enforce") -> None:
    """Stop the service and keep it from starting at boot (`disabled`), or leave it alone (`untouched`).

    A unit that does not exist is neither running nor enabled: then nothing is done. Under the mode `observe` neither.
    """
    if wanted == "disabled" and mode == "enforce":
        systemd.service(name="irqbalance off", service="irqbalance.service", running=False, enabled=False)
