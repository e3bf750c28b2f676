"""The inventory's key `device_plugins`: which manifests are made, and their settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any, Literal

from attrs import Attribute, field, frozen

from agent.spec.ranges import parse_ranges
from agent.spec.validators import Matches, Within
from tasks.kubernetes.label_keys import fault

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_image = Matches(re.compile(r"[a-z0-9][A-Za-z0-9_./:@-]*"), "give an image, as 'registry.example.net/plugin:v1'")
_namespace = Matches(re.compile(_LABEL), "give a namespace, as 'default'")
_runtime_class = Matches(re.compile(rf"{_LABEL}(\.{_LABEL})*"), "give a RuntimeClass, as 'nvidia'")
# The kubelet takes names of kubernetes.io for its own resources, and refuses the plugin.
_resource_prefix = Matches(
    re.compile(rf"(?!(.*\.)?kubernetes\.io$){_LABEL}(\.{_LABEL})*"),
    "give a DNS name that is not Kubernetes' own, as 'rdma'",
)
# k8s-rdma-shared-dev-plugin (validResourceName in pkg/resources) and sriov-network-device-plugin take these characters.
# Kubernetes takes at most 63, with a letter or a digit at both ends; "_vfio" may be appended.
RESOURCE_NAME = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_]{0,56}[a-zA-Z0-9])?")
_resource_name = Matches(
    RESOURCE_NAME, "give letters, digits and '_', at most 58, with a letter or a digit at both ends"
)


def _network(text: str) -> None:
    try:
        network = ip_network(text)
    except ValueError:
        raise ValueError(
            f"{text} is no IP network and prefix length (the bits after the prefix are 0); correct it"
        ) from None
    # host-local refuses a smaller one.
    if network.num_addresses < 4:
        raise ValueError(f"{text} has no room for pods; give a larger network")


_subnet = Matches(re.compile(r"[0-9a-f.:]+/\d{1,3}"), "give it as '10.56.217.0/24'", _network)
_quantity = Matches(re.compile(r"[1-9]\d*(m|Ki|Mi|Gi)?"), "give a quantity, as '500m' or '200Mi'")


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
        raise ValueError(f"{attribute.name}: {error}; write it as 0-3,8") from None


@frozen
class ContainerLimits:
    """The resource limits of a plugin's container."""

    cpu: str = field(default="1", validator=_quantity)
    memory: str = field(default="200Mi", validator=_quantity)


PODS_OF_A_PORT = 63
"""How many pods with a netdev of their own a RoCE port with 128 GIDs serves: the address of each takes one GID for RoCE v1 and
one for v2. It is the default of NVIDIA's network operator, for this reason (Mellanox/network-operator, pull request 580)."""


@frozen
class SharedRdma:
    """k8s-rdma-shared-dev-plugin. ``rdma_hca_max``: how many pods of a node can have the resource, however many NICs it has.

    ``periodic_update_interval``: seconds after which the plugin looks for devices again. ``rails``: besides the resource of
    all NICs, each NIC is a resource of its own with the NIC's name, as rdma/rail0.
    """

    image: str = field(default="ghcr.io/mellanox/k8s-rdma-shared-dev-plugin:v1.5.3", validator=_image)
    resource_prefix: str = field(default="rdma", validator=_resource_prefix)
    resource_name: str = field(default="hca_shared_devices_b", validator=_resource_name)
    rdma_hca_max: int = field(default=PODS_OF_A_PORT, validator=Within(1, 100_000, "pods"))
    periodic_update_interval: int = field(default=300, validator=Within(0, 86400, "s"))
    node_selector: Mapping[str, str] = field(factory=lambda: {"rdma": "hca"}, validator=_selector)
    rails: bool = False

    @property
    def resource(self) -> str:
        """The resource that pods request."""
        return f"{self.resource_prefix}/{self.resource_name}"


@frozen
class Sriov:
    """sriov-network-device-plugin. ``vfs``: the indexes of the VFs of each PF that it allocates; all by default.

    VFs with an RDMA device are the resource ``resource_name``_rdma, or _ib if it is InfiniBand; those bound to vfio-pci are
    ``resource_name``_vfio.
    """

    image: str = field(default="ghcr.io/k8snetworkplumbingwg/sriov-network-device-plugin:v3.9.0", validator=_image)
    resource_prefix: str = field(default="sriov", validator=_resource_prefix)
    resource_name: str = field(default="vf", validator=_resource_name)
    vfs: str | None = field(default=None, validator=_ranges)
    node_selector: Mapping[str, str] = field(
        factory=lambda: {"feature.node.kubernetes.io/network-sriov.configured": "true"}, validator=_selector
    )


@frozen
class ErdmaForm:
    """How eRDMA becomes a resource: the ``resource``, the plugin's ``image`` (None: none is installed) and its ``config``."""

    resource: str
    image: str | None = None
    config: Mapping[str, str] = field(factory=lambda: {"mode": "hca"})
    limits: ContainerLimits | None = None


ErdmaPlugin = Literal["ack", "controller", "rdma-device-plugin"]

# Images of ACK are in a registry of each region; name and tag are the vendor's.
ERDMA_FORMS: dict[ErdmaPlugin, ErdmaForm] = {
    "ack": ErdmaForm(
        "rdma/hca",
        "registry.cn-shanghai.aliyuncs.com/acs/k8s-rdma-sriov-dev-plugin:v1.0.0-b3dcbc5-aliyun",
        {"mode": "hca", "deviceType": "eRDMA"},
        ContainerLimits("300m", "300Mi"),
    ),
    "controller": ErdmaForm("aliyun/erdma"),
    "rdma-device-plugin": ErdmaForm("rdma/hca", "registry.cn-shanghai.aliyuncs.com/acs/rdma-device-plugin"),
}
"""``ack``: the plugin of ACK's guide to eRDMA. ``controller``: the ACK eRDMA Controller, an add-on of the cluster, which brings
its own manifests. ``rdma-device-plugin``: the plugin of Alibaba's guide to RDMA in Kubernetes
(developer.aliyun.com/article/664961). From vendor documents."""


@frozen
class Erdma:
    """Alibaba Cloud's plugin, in one of ERDMA_FORMS. From vendor documents; not run on such nodes."""

    plugin: ErdmaPlugin = "ack"
    image: str | None = field(default=None, validator=_image)
    node_selector: Mapping[str, str] = field(factory=lambda: {"aliyun.accelerator/erdma": "true"}, validator=_selector)

    def __attrs_post_init__(self) -> None:
        if self.image is not None and self.form.image is None:
            raise ValueError(f"image: the plugin {self.plugin!r} is not installed from here; remove image")

    @property
    def form(self) -> ErdmaForm:
        """The form's resource and image."""
        return ERDMA_FORMS[self.plugin]

    @property
    def resource(self) -> str:
        """The resource that pods request."""
        return self.form.resource


SRIOV_DRIVER: Literal["sriovnetwork.k8snetworkplumbingwg.io"] = "sriovnetwork.k8snetworkplumbingwg.io"
"""The name of dra-driver-sriov."""


@frozen
class Dra:
    """DeviceClasses and templates of claims for a DRA driver that the operator installs: dranet or dra-driver-sriov."""

    driver: Literal["dra.net", "sriovnetwork.k8snetworkplumbingwg.io"]
    namespace: str = field(default="default", validator=_namespace)


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


# As the releases of their repositories push them, below https://github.com/k8snetworkplumbingwg.
_PLUMBING = "ghcr.io/k8snetworkplumbingwg"


@frozen
class Multus:
    """Multus, which gives pods the networks of their annotations."""

    image: str = field(default=f"{_PLUMBING}/multus-cni:v4.3.0", validator=_image)


@frozen
class Whereabouts:
    """whereabouts, which assigns addresses that no two pods of the cluster have."""

    image: str = field(default=f"{_PLUMBING}/whereabouts:v0.9.4", validator=_image)


@frozen
class SriovCni:
    """sriov-cni, which moves VFs to pods."""

    image: str = field(default=f"{_PLUMBING}/sriov-cni:v2.10.0", validator=_image)


@frozen
class RdmaCni:
    """rdma-cni, which moves RDMA devices to pods (``rdma.netns_mode`` exclusive)."""

    image: str = field(default=f"{_PLUMBING}/rdma-cni:v1.6.0", validator=_image)


@frozen
class NetworkPlugins:
    """The plugins that the networks of pods need on every node. One that is None is not installed from here."""

    multus: Multus | None = None
    whereabouts: Whereabouts | None = None
    sriov_cni: SriovCni | None = None
    rdma_cni: RdmaCni | None = None


@frozen
class DevicePlugins:
    """The inventory's key. A plugin that is None is left out. The others are written only if a node has hardware for them."""

    folder: str
    namespace: str = field(default="kube-system", validator=_namespace)
    limits: ContainerLimits = ContainerLimits()
    shared_rdma: SharedRdma | None = field(factory=SharedRdma)
    sriov: Sriov | None = field(factory=Sriov)
    dra: Dra | None = None
    erdma: Erdma | None = field(factory=Erdma)
    nvidia: Nvidia | None = field(factory=Nvidia)
    test_pods: TestPods | None = TestPods()
    networks: Networks | None = None
    network_plugins: NetworkPlugins = NetworkPlugins()

    def __attrs_post_init__(self) -> None:
        if not self.folder.strip():
            raise ValueError("folder: it is empty; give the folder on the control host where the manifests are written")
        if self.dra and self.sriov:
            raise ValueError(
                "dra: sriov-network-device-plugin would give the VFs of a claim to other pods, too: the kubelet does not "
                "compare them; give None as sriov"
            )

    def warnings(self, distribution: str | None = None) -> list[str]:
        """Values that may not work, with the remedy. They are no errors: the cluster may have been prepared for them.

        ``distribution``: of the kubelets, as in the inventory's key ``kubelet``.
        """
        return [*self._more_pods_than_gids(), *self._other_folders(distribution)]

    def _more_pods_than_gids(self) -> list[str]:
        # How many GIDs a port has is not known here.
        shared = self.shared_rdma
        if self.networks is None or shared is None or shared.rdma_hca_max <= PODS_OF_A_PORT:
            return []
        return [
            f"shared_rdma.rdma_hca_max: {shared.rdma_hca_max} pods may share a port, and on RoCE each that has a netdev of its "
            f"own (networks) takes two GIDs or more; a port with 128 GIDs serves {PODS_OF_A_PORT}. Lower it, unless the ports "
            "have more (gid_tbl_len of `ibv_devinfo -v`)"
        ]

    def _other_folders(self, distribution: str | None) -> list[str]:
        # docs.k3s.io, Multus and IPAM plugins.
        if distribution != "k3s" or self.network_plugins == NetworkPlugins():
            return []
        return [
            "network_plugins: they are installed in /opt/cni/bin and /etc/cni/net.d, and K3s uses folders in "
            "/var/lib/rancher/k3s, so pods would get no networks, and nothing would say why; leave them out, and install "
            "Multus as K3s' documents say"
        ]


Plugin = SharedRdma | Sriov | Erdma | Nvidia

DAEMON_SETS = {
    "shared_rdma": "rdma-shared-device-plugin",
    "sriov": "sriov-device-plugin",
    "erdma": "erdma-device-plugin",
    "nvidia": "nvidia-device-plugin",
}
"""The name of each plugin's DaemonSet, by its key in ``device_plugins``."""
