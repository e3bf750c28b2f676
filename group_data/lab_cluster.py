"""Data of the lab's nodes when they are in its cluster, in addition to group_data/lab.py."""

from typing import Any as _Any

# At boot the kubelet waits until the agent has verified the node.
kubelet = {"policy": "hold"}
# The default labels only: the admission policy of fleet/cluster lists no others.
labels: dict[str, _Any] = {}
