"""Device plugins read their devices when they start. If the devices change, the plugin's label is removed for a while.

The label selects the plugin's DaemonSet: removing it deletes the plugin's pod, and a new pod sees the new devices.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import define, field

from agent.reporter.kubernetes.node import Node
from agent.reporter.kubernetes.steps import LONGEST_SLEEP
from agent.reporter.settings import Label

PLUGIN_PAUSE = 30.0
"""Seconds for which a label is absent at least: the DaemonSet's controller takes some time to delete the pod."""

PLUGIN_LONGEST = 600.0
"""Seconds after which a label is set again although its resource is still allocatable: another plugin offers it."""


@define
class PluginLabels:
    """Decides whether the labels of device plugins are absent now.

    ``devices``: the hash of the devices with which the plugins were started, as reports have it; empty before the first report.
    """

    devices: str = ""
    _absent_since: float | None = field(default=None, init=False)

    def absent(
        self, devices: str, labels: Collection[Label], node: Node, boot: str, clock: float
    ) -> tuple[bool, float]:
        """Whether the labels must be absent, and the seconds until that may change by itself.

        :param devices: the hash of the present devices; empty if they are unknown.
        :param boot: the ID of the present boot.
        :param clock: seconds since the boot.
        """
        devices = devices or self.devices
        plugins = (label for label in labels if label.role == "plugin")
        allocatable = any(label.resource is not None and node.can_give(label.resource) for label in plugins)
        if self._absent_since is None:
            if devices == self.devices or self._none_started(labels, node, boot, allocatable):
                self.devices = devices
                return False, LONGEST_SLEEP
            self._absent_since = clock
        shortest, longest = (self._absent_since + seconds - clock for seconds in (PLUGIN_PAUSE, PLUGIN_LONGEST))
        if shortest <= 0 and (longest <= 0 or not allocatable):
            self._absent_since, self.devices = None, devices
            return False, LONGEST_SLEEP
        return True, max(shortest if shortest > 0 else longest, 1.0)

    def _none_started(self, labels: Collection[Label], node: Node, boot: str, allocatable: bool) -> bool:
        """Whether no plugin has started yet: one that starts sees the devices of now.

        At the first complete report of a boot: if the kubelet of this boot runs already, and the Node has a plugin's label from
        the boot before, the kubelet may have started that plugin. Later: if the label is absent while the resource is
        allocatable, an earlier process of this reporter removed the label.
        """
        keys = {label.key for label in labels if label.role == "plugin"}
        if not self.devices:
            return node.boot_id != boot or not keys & node.ours
        return not keys & node.labels.keys() and not allocatable
