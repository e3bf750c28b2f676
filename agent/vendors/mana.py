"""Microsoft Azure Network Adapter. From the driver's source (drivers/net/ethernet/microsoft/mana): not run there."""

import re

from agent.vendors import Vendor


def _queue(role: str, number: int, named: int) -> tuple[str, int]:
    # mana_gd_get_gic counts vectors. Vector 0 is that of the management channel, and queue i has vector i + 1 (mana_create_eq).
    return ("q", number - 1) if role == "msi" else (role, number)


VENDOR = Vendor(
    name="mana",
    drivers=("mana",),
    # mana_q<n>@pci:<BDF> (mana_gd_setup_irqs), in later kernels mana_msi<n>@pci:<BDF> (mana_gd_get_gic, gdma_main.c);
    # mana_hwc@pci:<BDF> is the management one. Older kernels call all of them mana_intr, so none is recognised.
    queue_irqs=re.compile(r"^mana_(?P<role>q|msi)(?P<queue>\d+)@"),
    queue=_queue,
)
