"""The labels by which the plugins' DaemonSets select nodes, and whether Trackbed's reporter publishes them."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.hardware import Hardware
from tasks.kubernetes.labels import CAPABILITIES, Labels, labels_of
from tasks.kubernetes.manifests.device_plugins import DAEMON_SETS
from tasks.kubernetes.manifests.discovered import Discovered
from tasks.kubernetes.manifests.selectors import Nodes


def published(labels: Labels | None, hardware: Hardware) -> dict[str, str]:
    """The labels that the reporter publishes of a node. It publishes them only once the node is verified."""
    if labels is None:
        return {}
    made = labels_of(labels, hardware)
    return {label.key: label.value for label in made if labels.writer(label.key) == "reporter"}


def possible_labels(labels: Labels | None) -> dict[str, str]:
    """The labels that the reporter may publish of a host whose hardware is not known yet; which of them depends on it."""
    if labels is None:
        return {}
    made = {key: CAPABILITIES[key].value for key in labels.capabilities} | dict(labels.policy)
    return {key: value for key, value in made.items() if labels.writer(key) == "reporter"}


def selected(nodes: Nodes, selector: Mapping[str, str]) -> dict[str, Discovered]:
    """The nodes that publish each label of a selector: on these the DaemonSet has a pod."""
    return {name: node for name, node in nodes.items() if selector.items() <= node.labels.items()}


def unpublished(plugin: str, selector: Mapping[str, str], needing: Nodes) -> str:
    """Why the plugin's DaemonSet would have a pod on none of the hosts that need it, with the remedy.

    ``plugin``: its key in ``device_plugins``. ``needing``: the hosts that have hardware for the plugin; its DaemonSet selects
    none of them.
    """
    missing = {key: value for key, value in selector.items() if not selected(needing, {key: value})} or selector
    listed = ", ".join(f"{key}={value}" for key, value in sorted(missing.items()))
    hosts = ", ".join(_described(name, node, missing) for name, node in sorted(needing.items()))
    places = sorted({f"labels.{'capabilities' if key in CAPABILITIES else 'policy'}" for key in missing})
    return (
        f"{plugin}: the DaemonSet {DAEMON_SETS[plugin]} selects nodes by the label {listed}, which the reporter publishes on "
        f"none of the hosts that need the plugin ({hosts}); add it to {' and '.join(places)}, and leave it out of "
        f"labels.writers, or give another label in device_plugins.{plugin}.node_selector, or None as {plugin}. docs/labels.md "
        "says what a host must have for each label"
    )


def _described(name: str, node: Discovered, missing: Mapping[str, str]) -> str:
    others = [f"{key}={node.labels[key]}" for key in sorted(missing) if key in node.labels]
    return f"{name} with {' and '.join(others)}" if others else name
