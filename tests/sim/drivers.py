"""What the drivers of other NICs than igb do on the simulated machine: the names of their interrupts, and the driver of VFs.

The names are those of the drivers' sources, drivers/net/ethernet and drivers/infiniband/hw of Linux 6.12.
"""

from attrs import frozen


@frozen
class Driver:
    """``names``: of a netdev's interrupts; one with ``queue``, ``number`` (from 1) or ``second`` for each queue.

    ``vf``: the driver of its VFs. ``ports_share``: the ports of a function have the same interrupts.
    """

    names: tuple[str, ...]
    vf: str = ""
    ports_share: bool = False

    def irqs(self, netdev: str, address: str, queues: int) -> list[str]:
        """The names by the netdev's name, its PCI address and its number of queues."""
        return list(
            dict.fromkeys(
                name.format(
                    netdev=netdev,
                    address=address,
                    unit=netdev.lstrip("ib"),
                    queue=queue,
                    number=queue + 1,
                    second=queues + queue,
                    queues=queues,
                )
                for name in self.names
                for queue in range(queues)
            )
        )


DRIVERS = {
    # irq_set_name and mlx5_irq_alloc in mlx5/core/pci_irq.c.
    "mlx5_core": Driver(("mlx5_async0@pci:{address}", "mlx5_comp{queue}@pci:{address}"), "mlx5_core"),
    # mlx4_assign_eq in mlx4/eq.c, and mlx4_init_eq_table for the asynchronous one.
    "mlx4_core": Driver(("mlx4-async@pci:{address}", "mlx4-{number}@{address}"), "mlx4_core", ports_share=True),
    # bnxt_setup_msix
    "bnxt_en": Driver(("{netdev}-TxRx-{queue}",), "bnxt_en"),
    # ice_vsi_req_irq_msix and ice_req_irq_msix_misc.
    "ice": Driver(("ice-{address}:misc", "ice-{netdev}-TxRx-{queue}"), "iavf"),
    "i40e": Driver(("i40e-{address}:misc", "i40e-{netdev}-TxRx-{queue}"), "iavf"),
    # iavf_request_traffic_irqs and iavf_request_misc_irq.
    "iavf": Driver(("iavf-{address}:mbx", "iavf-{netdev}-TxRx-{queue}")),
    # ixgbe_request_msix_irqs
    "ixgbe": Driver(("{netdev}", "{netdev}-TxRx-{queue}"), "ixgbevf"),
    "ixgbevf": Driver(("{netdev}", "{netdev}-TxRx-{queue}")),
    # tg3_request_irq; the first of several vectors serves the link.
    "tg3": Driver(("{netdev}", "{netdev}-txrx-{number}")),
    # request_msix_queue_irqs and cxgb4_port_open in cxgb4_main.c; name_msix_vecs in cxgb4vf_main.c.
    "cxgb4": Driver(("{netdev}-FWeventq", "{netdev}-Rx{queue}"), "cxgb4vf"),
    "cxgb4vf": Driver(("{address}-FWeventq", "{netdev}-{queue}")),
    # ena_setup_mgmnt_intr and ena_setup_io_intr.
    "ena": Driver(("ena-mgmnt@pci:{address}", "{netdev}-Tx-Rx-{queue}")),
    "efa": Driver(("efa-mgmnt@pci:{address}", "efa-comp{queue}@pci:{address}")),
    "erdma": Driver(("erdma-common@pci:{address}", "erdma-ceq{queue}@pci:{address}")),
    # gve_alloc_notify_blocks: one block for each transmit queue, then one for each receive queue.
    "gve": Driver(
        ("gve-ntfy-blk{queue}@pci:{address}", "gve-ntfy-blk{second}@pci:{address}", "gve-mgmnt@pci:{address}")
    ),
    "mana": Driver(("mana_hwc@pci:{address}", "mana_q{queue}@pci:{address}")),
    # hclge_misc_irq_init, and hns3_nic_init_irq.
    "hns3": Driver(("hclge-misc-{address}", "hns3-{address}-TxRx-{queue}"), "hns3"),
    "ionic": Driver(("ionic-{address}-L0-adminq0", "ionic-{netdev}-L0-rx{queue}"), "ionic"),
    # vmxnet3_request_irqs; the event's interrupt comes after those of the queues.
    "vmxnet3": Driver(("{netdev}-rxtx-{queue}", "{netdev}-event-{queues}")),
    # enic_request_intr
    "enic": Driver(("{netdev}-rx-{queue}", "{netdev}-tx-{queue}", "{netdev}-err", "{netdev}-notify")),
    # bnx2_enable_msix
    "bnx2": Driver(("{netdev}-{queue}",)),
    # drivers/infiniband/hw/hfi1/msix.c; the number is the unit's, which is here that of the netdev.
    "hfi1": Driver(("hfi1_{unit}", "hfi1_{unit} sdma{queue}", "hfi1_{unit} kctxt{queue}")),
}
"""By name. A driver that is not here does what igb does."""
