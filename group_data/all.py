"""Defaults for every node. The data of a group or a host overrides them. docs/inventory.md has every key."""

from tasks.common.connection import TransportFactory as _TransportFactory

# They make the character devices that device plugins and rdma-core's tools need.
kernel_modules = ["ib_uverbs", "ib_umad", "rdma_ucm"]

ssh_paramiko_connect_kwargs = {"transport_factory": _TransportFactory()}
