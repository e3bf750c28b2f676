"""Makes the manifests of device plugins and related objects from the hardware of a fleet. Pure: same input, same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tasks.common.templates import render
from tasks.kubernetes.manifests import configurations
from tasks.kubernetes.manifests.configurations import Pool
from tasks.kubernetes.manifests.device_classes import device_classes
from tasks.kubernetes.manifests.device_plugins import DevicePlugins, Plugin
from tasks.kubernetes.manifests.discovered import Discovered
from tasks.kubernetes.manifests.network_plugins import network_plugins
from tasks.kubernetes.manifests.networks import networks
from tasks.kubernetes.manifests.node_labels import selected, unpublished
from tasks.kubernetes.manifests.selectors import Nodes
from tasks.kubernetes.manifests.test_pods import test_pods


def manifests(wanted: DevicePlugins, nodes: Nodes, possible_labels: Sequence[Mapping[str, str]] = ()) -> dict[str, str]:
    """The files of the folder, by their paths in it. ``nodes``: the hardware by host name.

    A plugin's configuration is made from the nodes that its DaemonSet selects. ``possible_labels``: for each host whose
    hardware is not known yet, the labels that it may publish.

    :raises ValueError: a plugin cannot serve this hardware, or none of the nodes that need it publishes the label of its
        DaemonSet; the text names the plugin's key, the reason and the remedy.
    """
    nodes = {name: nodes[name] for name in sorted(nodes)}
    files: dict[str, str] = {}
    common: dict[str, Any] = {"namespace": wanted.namespace, "limits": wanted.limits}
    pools: list[Pool] = []
    if wanted.shared_rdma and (served := _served("shared_rdma", wanted, nodes, possible_labels)):
        with _named("shared_rdma"):
            config = configurations.shared_rdma(wanted.shared_rdma, served)
        files["rdma-shared-device-plugin.yaml"] = _plugin("rdma-shared", config, settings=wanted.shared_rdma, **common)
    if wanted.sriov and (served := _served("sriov", wanted, nodes, possible_labels)):
        with _named("sriov"):
            pools = configurations.sriov(wanted.sriov, served)
        resources = {"resourceList": [pool.plain() for pool in pools]}
        files["sriov-device-plugin.yaml"] = _plugin("sriov", resources, settings=wanted.sriov, **common)
    if wanted.erdma and wanted.erdma.form.image and _served("erdma", wanted, nodes, possible_labels):
        files["erdma-device-plugin.yaml"] = _plugin("erdma", wanted.erdma.form.config, settings=wanted.erdma, **common)
    if wanted.nvidia and _served("nvidia", wanted, nodes, possible_labels):
        files["nvidia-device-plugin.yaml"] = render(
            "manifests/nvidia-device-plugin.yaml.j2", settings=wanted.nvidia, **common
        )
    if wanted.networks and (made := networks(wanted.networks, wanted.sriov, pools, nodes)):
        files["networks.yaml"] = render("manifests/networks.yaml.j2", settings=wanted.networks, networks=made)
    if wanted.dra:
        with _named("dra"):
            classes = device_classes(wanted.dra, wanted.networks, nodes)
        files |= {"device-classes.yaml": classes} if classes else {}
    if contents := _nccl(nodes):
        files["nccl.yaml"] = render("manifests/nccl.yaml.j2", contents=contents, namespace="default")
    files["kustomization.yaml"] = render("manifests/kustomization.yaml.j2", names=sorted(files))
    return files | test_pods(wanted, nodes, pools) | network_plugins(wanted)


def _served(name: str, wanted: DevicePlugins, nodes: Nodes, possible_labels: Sequence[Mapping[str, str]]) -> Nodes:
    """The nodes that a plugin's DaemonSet selects.

    None if no node has hardware for the plugin, or if only hosts whose hardware is not known yet may publish its label.
    """
    plugin: Plugin = getattr(wanted, name)
    needing = {host: node for host, node in nodes.items() if _has_hardware(name, wanted, node)}
    served = selected(nodes, plugin.node_selector)
    if needing and not served.keys() & needing.keys():
        if any(plugin.node_selector.items() <= labels.items() for labels in possible_labels):
            return {}
        raise ValueError(unpublished(name, plugin.node_selector, needing))
    return served if needing else {}


def _has_hardware(name: str, wanted: DevicePlugins, node: Discovered) -> bool:
    if name == "shared_rdma":
        return bool(node.hcas())
    if name == "sriov":
        return bool(wanted.sriov and configurations.pooled(wanted.sriov, node))
    return node.erdma if name == "erdma" else node.gpus


@contextmanager
def _named(plugin: str) -> Iterator[None]:
    """Name the plugin, or another key, in the error of its configuration."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{plugin}: {error}") from None


def _plugin(name: str, config: object, **values: Any) -> str:
    text = json.dumps(config, indent=2)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return render(f"manifests/{name}-device-plugin.yaml.j2", config=text, digest=digest, **values)


def _nccl(nodes: Mapping[str, Discovered]) -> list[dict[str, Any]]:
    texts: dict[str, list[str]] = {}
    for name, node in nodes.items():
        if node.nccl:
            texts.setdefault(node.nccl, []).append(name)
    kinds = {text: "nccl-type-2" if "NCCL_IB_DISABLE=1" in text else "nccl-type-1" for text in texts}
    config_maps = []
    for text in sorted(texts):
        sole = list(kinds.values()).count(kinds[text]) == 1
        suffix = "" if sole else f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        config_maps.append({"name": f"{kinds[text]}{suffix}", "text": text.rstrip("\n"), "nodes": texts[text]})
    return config_maps
