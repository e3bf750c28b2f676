"""Microsoft Azure Network Adapter. From the driver's source (drivers/net/ethernet/microsoft/mana): not run there."""

import re

from agent.vendors import Vendor


def _queue(role: str, number: int, named: int) -> tuple[str, int] | None:
    # mana_gd_get_gic counts vectors. Vector 0 is that of the management channel, and queue i has vector i + 1 (mana_create_eq).
    if role == "q":
        return role, number
    return (role.replace("msi", "q"), number - 1) if number else None


VENDOR = Vendor(
    name="mana",
    drivers=("mana",),
    # mana_q<n>@pci:<BDF> (mana_gd_setup_irqs), in later kernels mana_msi<n>@pci:<BDF> (mana_gd_get_gic, gdma_main.c);
    # mana_hwc@pci:<BDF> is the management one. Older kernels call all of them mana_intr, in the order of the vectors.
    queue_irqs=re.compile(r"^mana_(?:(?P<role>q|msi)(?P<queue>\d+)@|intr$)"),
    queue=_queue,
)
