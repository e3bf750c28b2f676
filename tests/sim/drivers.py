"""What the drivers of other NICs than igb do on the simulated machine: the names of their interrupts, and the driver of VFs.

The names are those of the drivers' sources, drivers/net/ethernet and drivers/infiniband/hw of Linux 6.12.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen


@frozen
class Driver:
    """``irqs``: the names of a netdev's interrupts by its name, its PCI address and its number of queues. ``vf``: of its VFs.

    ``ports_share``: the ports of a function have the same interrupts.
    """

    irqs: Callable[[str, str, int], list[str]]
    vf: str = ""
    ports_share: bool = False


def _mlx5(netdev: str, address: str, queues: int) -> list[str]:
    # irq_set_name and mlx5_irq_alloc in mlx5/core/pci_irq.c.
    return [f"mlx5_async0@pci:{address}", *(f"mlx5_comp{queue}@pci:{address}" for queue in range(queues))]


def _mlx4(netdev: str, address: str, queues: int) -> list[str]:
    # mlx4_assign_eq in mlx4/eq.c, and mlx4_init_eq_table for the asynchronous one.
    return [f"mlx4-async@pci:{address}", *(f"mlx4-{vector}@{address}" for vector in range(1, queues + 1))]


def _bnxt(netdev: str, address: str, queues: int) -> list[str]:
    return [f"{netdev}-TxRx-{queue}" for queue in range(queues)]  # bnxt_setup_msix


def _ice(netdev: str, address: str, queues: int) -> list[str]:
    # ice_vsi_req_irq_msix and ice_req_irq_msix_misc.
    return [f"ice-{address}:misc", *(f"ice-{netdev}-TxRx-{queue}" for queue in range(queues))]


def _i40e(netdev: str, address: str, queues: int) -> list[str]:
    return [f"i40e-{address}:misc", *(f"i40e-{netdev}-TxRx-{queue}" for queue in range(queues))]


def _iavf(netdev: str, address: str, queues: int) -> list[str]:
    # iavf_request_traffic_irqs and iavf_request_misc_irq.
    return [f"iavf-{address}:mbx", *(f"iavf-{netdev}-TxRx-{queue}" for queue in range(queues))]


def _ixgbe(netdev: str, address: str, queues: int) -> list[str]:
    return [netdev, *(f"{netdev}-TxRx-{queue}" for queue in range(queues))]  # ixgbe_request_msix_irqs


def _tg3(netdev: str, address: str, queues: int) -> list[str]:
    # tg3_request_irq; the first of several vectors serves the link.
    return [netdev, *(f"{netdev}-txrx-{queue}" for queue in range(1, queues + 1))]


def _cxgb4(netdev: str, address: str, queues: int) -> list[str]:
    # request_msix_queue_irqs and cxgb4_port_open in cxgb4_main.c.
    return [f"{netdev}-FWeventq", *(f"{netdev}-Rx{queue}" for queue in range(queues))]


def _cxgb4vf(netdev: str, address: str, queues: int) -> list[str]:
    return [f"{address}-FWeventq", *(f"{netdev}-{queue}" for queue in range(queues))]  # name_msix_vecs


def _ena(netdev: str, address: str, queues: int) -> list[str]:
    # ena_setup_mgmnt_intr and ena_setup_io_intr.
    return [f"ena-mgmnt@pci:{address}", *(f"{netdev}-Tx-Rx-{queue}" for queue in range(queues))]


def _efa(netdev: str, address: str, queues: int) -> list[str]:
    return [f"efa-mgmnt@pci:{address}", *(f"efa-comp{queue}@pci:{address}" for queue in range(queues))]


def _erdma(netdev: str, address: str, queues: int) -> list[str]:
    return [f"erdma-common@pci:{address}", *(f"erdma-ceq{queue}@pci:{address}" for queue in range(queues))]


def _gve(netdev: str, address: str, queues: int) -> list[str]:
    # gve_alloc_notify_blocks: one block for each transmit queue, then one for each receive queue.
    return [*(f"gve-ntfy-blk{block}@pci:{address}" for block in range(2 * queues)), f"gve-mgmnt@pci:{address}"]


def _mana(netdev: str, address: str, queues: int) -> list[str]:
    return [f"mana_hwc@pci:{address}", *(f"mana_q{queue}@pci:{address}" for queue in range(queues))]


def _hns3(netdev: str, address: str, queues: int) -> list[str]:
    # hclge_misc_irq_init, and hns3_nic_init_irq.
    return [f"hclge-misc-{address}", *(f"hns3-{address}-TxRx-{queue}" for queue in range(queues))]


def _ionic(netdev: str, address: str, queues: int) -> list[str]:
    return [f"ionic-{address}-L0-adminq0", *(f"ionic-{netdev}-L0-rx{queue}" for queue in range(queues))]


def _vmxnet3(netdev: str, address: str, queues: int) -> list[str]:
    # vmxnet3_request_irqs; the event's interrupt comes after those of the queues.
    return [*(f"{netdev}-rxtx-{queue}" for queue in range(queues)), f"{netdev}-event-{queues}"]


def _enic(netdev: str, address: str, queues: int) -> list[str]:
    # enic_request_intr
    of_queues = [f"{netdev}-{way}-{queue}" for way in ("rx", "tx") for queue in range(queues)]
    return [*of_queues, f"{netdev}-err", f"{netdev}-notify"]


def _bnx2(netdev: str, address: str, queues: int) -> list[str]:
    return [f"{netdev}-{queue}" for queue in range(queues)]  # bnx2_enable_msix


def _hfi1(netdev: str, address: str, queues: int) -> list[str]:
    # drivers/infiniband/hw/hfi1/msix.c; the number is the unit's, which is here that of the netdev.
    unit = f"hfi1_{netdev.lstrip('ib')}"
    return [
        unit,
        *(f"{unit} sdma{queue}" for queue in range(queues)),
        *(f"{unit} kctxt{queue}" for queue in range(queues)),
    ]


DRIVERS = {
    "mlx5_core": Driver(_mlx5, "mlx5_core"),
    "mlx4_core": Driver(_mlx4, "mlx4_core", ports_share=True),
    "bnxt_en": Driver(_bnxt, "bnxt_en"),
    "ice": Driver(_ice, "iavf"),
    "i40e": Driver(_i40e, "iavf"),
    "iavf": Driver(_iavf),
    "ixgbe": Driver(_ixgbe, "ixgbevf"),
    "ixgbevf": Driver(_ixgbe),
    "tg3": Driver(_tg3),
    "cxgb4": Driver(_cxgb4, "cxgb4vf"),
    "cxgb4vf": Driver(_cxgb4vf),
    "ena": Driver(_ena),
    "efa": Driver(_efa),
    "erdma": Driver(_erdma),
    "gve": Driver(_gve),
    "mana": Driver(_mana),
    "hns3": Driver(_hns3, "hns3"),
    "ionic": Driver(_ionic, "ionic"),
    "vmxnet3": Driver(_vmxnet3),
    "enic": Driver(_enic),
    "bnx2": Driver(_bnx2),
    "hfi1": Driver(_hfi1),
}
"""By name. A driver that is not here does what igb does."""
