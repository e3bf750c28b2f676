"""What the lab's nodes are given beside group_data/lab.py when they are nodes of its cluster."""

from typing import Any as _Any

# At boot the kubelet waits for the node to be verified.
kubelet = {"policy": "hold"}
# Those that are found by rule, and no others: they are what the policy of fleet/cluster lists.
labels: dict[str, _Any] = {}
