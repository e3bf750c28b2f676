"""Makes the manifests of device plugins and related objects from the hardware of a fleet. Pure: same input, same bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import Attribute, field, frozen

from agent.spec.ranges import format_ranges, parse_ranges
from agent.spec.validators import Matches, Within
from tasks.common.label_keys import EXTENDED_RESOURCE, fault
from tasks.common.templates import render
from tasks.hardware import Hardware

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_image = Matches(re.compile(r"[a-z0-9][A-Za-z0-9_./:@-]*"), "give an image, as 'registry.example.net/plugin:v1'")
_namespace = Matches(re.compile(_LABEL), "give a namespace, as 'default'")
_runtime_class = Matches(re.compile(rf"{_LABEL}(\.{_LABEL})*"), "give a RuntimeClass, as 'nvidia'")
_resource_prefix = Matches(re.compile(rf"{_LABEL}(\.{_LABEL})*"), "give a DNS name, as 'rdma'")
# As in k8s-rdma-shared-dev-plugin (validResourceName in pkg/resources) and sriov-network-device-plugin.
_resource_name = Matches(re.compile(r"[a-zA-Z0-9_]+"), "give letters, digits and '_'")
_resource = Matches(EXTENDED_RESOURCE, "give it as 'aliyun/erdma'")
_quantity = Matches(re.compile(r"[1-9]\d*(m|Ki|Mi|Gi)?"), "give a quantity, as '500m' or '200Mi'")
_subnet = Matches(re.compile(r"[0-9a-f.:]+/\d{1,3}"), "give it as '10.56.217.0/24'")

VFIO = "vfio-pci"


def _selector(_: object, attribute: Attribute[Any], labels: Mapping[str, str]) -> None:
    if not labels:
        raise ValueError(f"{attribute.name}: without a label the plugin would run on every node; give one")
    faults = [reason for key, value in labels.items() if (reason := fault(key, value, "reporter"))]
    if faults:
        raise ValueError(f"{attribute.name}: {'; '.join(faults)}")


def _ranges(_: object, attribute: Attribute[Any], text: str | None) -> None:
    try:
        parse_ranges(text or "")
    except ValueError as error:
        raise ValueError(f"{attribute.name}: {error}") from None


@frozen
class SharedRdma:
    """k8s-rdma-shared-dev-plugin. ``rdma_hca_max``: how many pods can share a device.

    ``periodic_update_interval``: seconds after which the plugin looks for devices again.
    """

    image: str = field(default="ghcr.io/mellanox/k8s-rdma-shared-dev-plugin:v1.5.3", validator=_image)
    resource_prefix: str = field(default="rdma", validator=_resource_prefix)
    resource_name: str = field(default="hca_shared_devices_b", validator=_resource_name)
    rdma_hca_max: int = field(default=1000, validator=Within(1, 100_000, "pods"))
    periodic_update_interval: int = field(default=300, validator=Within(0, 86400, "s"))
    node_selector: Mapping[str, str] = field(factory=lambda: {"rdma": "hca"}, validator=_selector)

    @property
    def resource(self) -> str:
        """The resource that pods request."""
        return f"{self.resource_prefix}/{self.resource_name}"


@frozen
class Sriov:
    """sriov-network-device-plugin. ``vfs``: the indexes of the VFs of each PF that it allocates; all by default.

    VFs with an RDMA device are the resource ``resource_name``_rdma, those bound to vfio-pci ``resource_name``_vfio.
    """

    image: str = field(default="ghcr.io/k8snetworkplumbingwg/sriov-network-device-plugin:v3.9.0", validator=_image)
    resource_prefix: str = field(default="sriov", validator=_resource_prefix)
    resource_name: str = field(default="vf", validator=_resource_name)
    vfs: str | None = field(default=None, validator=_ranges)
    node_selector: Mapping[str, str] = field(
        factory=lambda: {"feature.node.kubernetes.io/network-sriov.configured": "true"}, validator=_selector
    )


@frozen
class Erdma:
    """Alibaba Cloud's plugin. ``resource``: what it makes allocatable. From vendor documents; not run on such nodes."""

    image: str = field(default="registry.cn-shanghai.aliyuncs.com/acs/rdma-device-plugin", validator=_image)
    resource: str = field(default="aliyun/erdma", validator=_resource)
    node_selector: Mapping[str, str] = field(factory=lambda: {"aliyun.accelerator/erdma": "true"}, validator=_selector)


@frozen
class Nvidia:
    """NVIDIA's plugin. ``runtime_class``: for nodes where NVIDIA's runtime is not the default. Not run on GPUs."""

    image: str = field(default="nvcr.io/nvidia/k8s-device-plugin:v0.20.0", validator=_image)
    runtime_class: str | None = field(default=None, validator=_runtime_class)
    node_selector: Mapping[str, str] = field(factory=lambda: {"nvidia.com/gpu.present": "true"}, validator=_selector)


@frozen
class TestPods:
    """Pods to test RDMA between two nodes; the image must have perftest."""

    image: str = field(default="docker.io/mellanox/rping-test", validator=_image)
    namespace: str = field(default="default", validator=_namespace)


@frozen
class Networks:
    """NetworkAttachmentDefinitions: macvlan on each PF, SR-IOV for each resource. ``subnet``: the range of their addresses.

    ``host-local`` assigns addresses on each node independently, so nodes may assign the same address. Use it only for networks
    that do not connect nodes.
    """

    subnet: str = field(validator=_subnet)
    ipam: Literal["whereabouts", "host-local"] = "whereabouts"
    namespace: str = field(default="default", validator=_namespace)

    def addresses(self) -> dict[str, str]:
        """The value of CNI's key `ipam`."""
        return {"type": self.ipam, "range" if self.ipam == "whereabouts" else "subnet": self.subnet}


@frozen
class Limits:
    """The resource limits of a plugin's container."""

    cpu: str = field(default="1", validator=_quantity)
    memory: str = field(default="200Mi", validator=_quantity)


@frozen
class DevicePlugins:
    """The inventory's key. A plugin that is None is left out. The others are written only if a node has hardware for them."""

    folder: str
    namespace: str = field(default="kube-system", validator=_namespace)
    limits: Limits = Limits()
    shared_rdma: SharedRdma | None = field(factory=SharedRdma)
    sriov: Sriov | None = field(factory=Sriov)
    erdma: Erdma | None = field(factory=Erdma)
    nvidia: Nvidia | None = field(factory=Nvidia)
    test_pods: TestPods | None = TestPods()
    networks: Networks | None = None

    def __attrs_post_init__(self) -> None:
        if not self.folder.strip():
            raise ValueError("folder: it is empty; give the folder on the control host where the manifests are written")


@frozen
class Vf:
    """A VF; ``vendor`` and ``device`` as lspci prints them."""

    index: int
    vendor: str
    device: str
    driver: str
    rdma: bool


@frozen
class Pf:
    """A PF that has a netdev. ``mtu`` in bytes."""

    name: str
    mtu: int
    rdma: bool
    vfs: tuple[Vf, ...] = ()


@frozen
class Discovered:
    """The part of a node's hardware that the manifests depend on. ``hcas``: vendor and device of functions that pods share."""

    hcas: tuple[tuple[str, str], ...] = ()
    erdma: bool = False
    gpus: bool = False
    pfs: tuple[Pf, ...] = ()
    nccl: str = ""


def discover(hardware: Hardware, nccl: str = "") -> Discovered:
    """The part of a node's hardware that the manifests depend on, sorted."""
    return Discovered(
        tuple(sorted({(function.vendor, function.device) for function in hardware.hcas()})),
        any(function.is_erdma for function in hardware.functions),
        bool(hardware.gpus),
        tuple(
            Pf(
                function.netdevs[0].name,
                function.netdevs[0].mtu,
                bool(function.rdma) or any(vf.rdma for vf in function.vfs),
                tuple(
                    Vf(vf.index or 0, vf.vendor, vf.device, vf.driver, bool(vf.rdma))
                    for vf in sorted(function.vfs, key=lambda vf: vf.index or 0)
                    if vf.driver
                ),
            )
            for function in sorted(hardware.functions, key=lambda function: function.address)
            if function.netdevs and (function.vfs or function.rdma) and not function.is_erdma
        ),
        nccl,
    )


def manifests(wanted: DevicePlugins, nodes: Mapping[str, Discovered]) -> dict[str, str]:
    """The files of the folder, by name. ``nodes``: the hardware by host name."""
    nodes = {name: nodes[name] for name in sorted(nodes)}
    files: dict[str, str] = {}
    common: dict[str, Any] = {"namespace": wanted.namespace, "limits": wanted.limits}
    pools: list[dict[str, Any]] = []
    if wanted.shared_rdma and (config := _shared(wanted.shared_rdma, nodes.values())):
        files["rdma-shared-device-plugin.yaml"] = _plugin("rdma-shared", config, settings=wanted.shared_rdma, **common)
    if wanted.sriov and (pools := _pools(wanted.sriov, nodes.values())):
        files["sriov-device-plugin.yaml"] = _plugin("sriov", {"resourceList": pools}, settings=wanted.sriov, **common)
    if wanted.erdma and any(node.erdma for node in nodes.values()):
        config = {"mode": "hca", "deviceType": "eRDMA"}
        files["erdma-device-plugin.yaml"] = _plugin("erdma", config, settings=wanted.erdma, **common)
    if wanted.nvidia and any(node.gpus for node in nodes.values()):
        files["nvidia-device-plugin.yaml"] = render(
            "manifests/nvidia-device-plugin.yaml.j2", settings=wanted.nvidia, **common
        )
    if wanted.networks and (networks := _networks(wanted.networks, wanted.sriov, pools, nodes.values())):
        files["networks.yaml"] = render("manifests/networks.yaml.j2", settings=wanted.networks, networks=networks)
    if contents := _nccl(nodes):
        files["nccl.yaml"] = render("manifests/nccl.yaml.j2", contents=contents, namespace="default")
    files["kustomization.yaml"] = render("manifests/kustomization.yaml.j2", names=sorted(files))
    return files | _test_pods(wanted, files)


def _plugin(name: str, config: object, **values: Any) -> str:
    text = json.dumps(config, indent=2)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return render(f"manifests/{name}-device-plugin.yaml.j2", config=text, digest=digest, **values)


def _shared(wanted: SharedRdma, nodes: Iterable[Discovered]) -> dict[str, Any]:
    ids = {each for node in nodes for each in node.hcas}
    if not ids:
        return {}
    # A device matches if its vendor is in one list and its device ID in the other. The plugin's IDs have no 0x.
    selectors = {"vendors": sorted({vendor for vendor, _ in ids}), "deviceIDs": sorted({device for _, device in ids})}
    resource = {
        "resourceName": wanted.resource_name,
        "resourcePrefix": wanted.resource_prefix,
        "rdmaHcaMax": wanted.rdma_hca_max,
        "selectors": selectors,
    }
    return {"periodicUpdateInterval": wanted.periodic_update_interval, "configList": [resource]}


def _pools(wanted: Sriov, nodes: Iterable[Discovered]) -> list[dict[str, Any]]:
    """A resource for each kind of VF: without an RDMA device, with one, and bound to vfio-pci.

    If several nodes have a PF of the same name, its range covers the VFs of all of them.
    """
    only = set(parse_ranges(wanted.vfs)) if wanted.vfs else None
    kinds: dict[str, list[tuple[str, Vf]]] = {}
    for node in nodes:
        for pf in node.pfs:
            for vf in pf.vfs:
                if only is None or vf.index in only:
                    suffix = "_vfio" if vf.driver == VFIO else "_rdma" if vf.rdma else ""
                    kinds.setdefault(suffix, []).append((pf.name, vf))
    return [_pool(wanted, suffix, kinds[suffix]) for suffix in sorted(kinds)]


def _pool(wanted: Sriov, suffix: str, vfs: list[tuple[str, Vf]]) -> dict[str, Any]:
    indexes: dict[str, set[int]] = {}
    for name, vf in vfs:
        indexes.setdefault(name, set()).add(vf.index)
    selectors: dict[str, Any] = {
        "vendors": sorted({vf.vendor for _, vf in vfs}),
        "devices": sorted({vf.device for _, vf in vfs}),
        "drivers": sorted({vf.driver for _, vf in vfs}),
        "pfNames": [f"{name}#{format_ranges(indexes[name])}" for name in sorted(indexes)],
    }
    if suffix == "_rdma":
        selectors["isRdma"] = True
    return {"resourceName": f"{wanted.resource_name}{suffix}", "selectors": selectors}


def _networks(
    wanted: Networks, sriov: Sriov | None, pools: list[dict[str, Any]], nodes: Iterable[Discovered]
) -> list[dict[str, Any]]:
    mtus: dict[str, int] = {}
    for pf in (pf for node in nodes for pf in node.pfs if pf.rdma):
        mtus[pf.name] = min(pf.mtu, mtus.get(pf.name, pf.mtu))
    networks = []
    for name in sorted(mtus):
        plugin = {"type": "macvlan", "master": name, "mode": "bridge", "mtu": mtus[name], "ipam": wanted.addresses()}
        networks.append(_network(f"macvlan-{name}", plugin, None))
    for pool in pools:
        # A VF bound to vfio-pci has no netdev, so it gets no address.
        bound_to_vfio = pool["selectors"]["drivers"] == [VFIO]
        plugin = {"type": "sriov"} if bound_to_vfio else {"type": "sriov", "ipam": wanted.addresses()}
        resource = f"{sriov.resource_prefix}/{pool['resourceName']}" if sriov else None
        networks.append(_network(f"sriov-{pool['resourceName']}", plugin, resource))
    return networks


def _network(name: str, plugin: Mapping[str, object], resource: str | None) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9.-]", "-", name.lower())
    return {
        "name": name,
        "resource": resource,
        "config": json.dumps({"cniVersion": "0.3.1", "name": name, **plugin}, indent=2),
    }


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


def _test_pods(wanted: DevicePlugins, files: Mapping[str, str]) -> dict[str, str]:
    """The test pods' files. They are not in the kustomization, since they are created only for a test."""
    if wanted.test_pods is None:
        return {}
    kinds: list[tuple[str, str, Mapping[str, str]]] = []
    if wanted.shared_rdma and "rdma-shared-device-plugin.yaml" in files:
        kinds.append(("rdma-test", wanted.shared_rdma.resource, wanted.shared_rdma.node_selector))
    if wanted.erdma and "erdma-device-plugin.yaml" in files:
        kinds.append(("erdma-test", wanted.erdma.resource, wanted.erdma.node_selector))
    return {
        f"{name}-pods.yaml": render(
            "manifests/test-pods.yaml.j2",
            pods=name,
            resource=resource,
            node_selector=selector,
            settings=wanted.test_pods,
        )
        for name, resource, selector in kinds
    }
