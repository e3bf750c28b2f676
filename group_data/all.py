"""What holds for every node; a group or a host may say otherwise. docs/inventory.md has every key."""

from tasks.common.connection import NoDelay as _NoDelay

# Character devices that device plugins and rdma-core's tools look for.
kernel_modules = ["ib_uverbs", "ib_umad", "rdma_ucm"]

ssh_paramiko_connect_kwargs = {"transport_factory": _NoDelay()}
