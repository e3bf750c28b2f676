"""Writes the files from which the Node gets its labels: capabilities that follow from its hardware, and the inventory's labels.

Each label has one writer: the reporter, NFD or the kubelet. The reporter publishes its labels when the agent's first pass is
verified. Only the reporter may write a label that selects a device plugin, since the kubelet and NFD write theirs before the
node is known to be ready.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from attrs import asdict, field, frozen
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.report import names
from agent.reporter import settings
from agent.reporter.settings import Label, Role
from tasks.common import systemd_reload, units
from tasks.common.commands import Commands, refuse, warn
from tasks.common.data import Key, host_data, record
from tasks.common.texts import HEADER, Texts, replace
from tasks.hardware import MELLANOX, UNKNOWN, Hardware, here, is_erdma, shared
from tasks.kubernetes import KUBERNETES
from tasks.kubernetes.kubelet_arguments import ENVIRONMENT, NodeKubelet, quoted
from tasks.kubernetes.label_keys import EXTENDED_RESOURCE, Writer, fault, refused_of_reporters

LABELS = str(settings.LABELS)
NFD = "/etc/kubernetes/node-feature-discovery/features.d/trackbed"
UNIT = "kubelet.service"
DROP_IN = f"{units.FOLDER}/{UNIT}.d/30-trackbed-registration.conf"

# NFD: source/local, MaxFeatureFileSize.
NFD_LIMIT = 65536

TAINT = f"{names.TAINT}:{names.EFFECT}"
KUBEADM = "kubeadm"
PATHS = (LABELS, NFD, ENVIRONMENT, DROP_IN)

# kubeadm's unit reads KUBELET_EXTRA_ARGS from /etc/default/kubelet (Debian) or /etc/sysconfig/kubelet (RPM). This drop-in comes
# later and overrides it, and any Environment=, so ENVIRONMENT repeats the operator's arguments.
DROP_IN_TEXT = f"{HEADER}[Service]\nEnvironmentFile={ENVIRONMENT}\n"


@frozen
class Capability:
    """A label for nodes whose hardware satisfies ``has``.

    ``role``: ``plugin`` if a device plugin's DaemonSet selects its nodes by this label. ``resource``: what that plugin makes
    allocatable. ``default``: the label is published if the inventory gives no list. (Labels that other programs write are not.)
    """

    key: str
    value: str
    has: Callable[[Hardware], bool]
    role: Role = "fact"
    resource: str | None = None
    default: bool = False


def _shared_hca(node: Hardware) -> bool:
    # k8s-rdma-shared-dev-plugin ignores a device that lacks one of these.
    ready = (
        device.offers("uverbs") and device.offers("umad")
        for function in shared(node.all_functions())
        for device in function.rdma
    )
    return node.rdma_cm and any(ready)


def _erdma(node: Hardware) -> bool:
    return any(is_erdma(function) and function.rdma for function in node.functions)


def _rdma(node: Hardware) -> bool:
    return any(function.rdma for function in node.all_functions())


def _mellanox(node: Hardware) -> bool:
    return any(function.vendor == MELLANOX for function in node.functions)


def _mellanox_rdma(node: Hardware) -> bool:
    return any(function.vendor == MELLANOX and function.rdma for function in node.all_functions())


def _verbs_loaded(node: Hardware) -> bool:
    return _mellanox(node) and {"ib_uverbs", "rdma_ucm"} <= node.modules


def _sriov(node: Hardware) -> bool:
    return any(function.total_vfs for function in node.functions)


def _sriov_configured(node: Hardware) -> bool:
    return any(function.vfs for function in node.functions)


def _gpu(node: Hardware) -> bool:
    return any(gpu.driver == "nvidia" for gpu in node.gpus)


FEATURE = "feature.node.kubernetes.io"
CAPABILITIES = {
    each.key: each
    for each in (
        Capability("rdma", "hca", _shared_hca, "plugin", "rdma/hca_shared_devices_b", default=True),
        Capability("aliyun.accelerator/erdma", "true", _erdma, "plugin", "rdma/hca", default=True),
        Capability(f"{FEATURE}/network-rdma.capable", "true", _rdma, default=True),
        Capability(f"{FEATURE}/network-sriov.capable", "true", _sriov),
        Capability(f"{FEATURE}/network-sriov.configured", "true", _sriov_configured, "plugin"),
        Capability(f"{FEATURE}/custom-rdma.capable", "true", _mellanox),
        Capability(f"{FEATURE}/custom-rdma.available", "true", _verbs_loaded),
        Capability(f"{FEATURE}/pci-{MELLANOX}.present", "true", _mellanox),
        Capability("network.nvidia.com/operator.mofed.wait", "false", _mellanox_rdma, "plugin"),
        Capability("nvidia.com/gpu.present", "true", _gpu, "plugin", "nvidia.com/gpu"),
    )
}
DEFAULT = tuple(key for key, each in CAPABILITIES.items() if each.default)


@frozen
class Labels:
    """The inventory's key.

    ``capabilities``: those of CAPABILITIES to publish on nodes that have them. ``policy``: labels with fixed values.
    ``writers``: the writer of a label, if it is not the reporter. ``resources``: the resource of the plugin that a label
    selects, if it is not the default one. ``register_tainted``: whether the kubelet registers the Node with Trackbed's taint;
    None: yes, if the reporter publishes to Kubernetes (it removes the taint) and the kubelet is kubeadm's, which takes
    arguments.
    """

    capabilities: tuple[str, ...] = DEFAULT
    policy: Mapping[str, str] = field(factory=dict)
    writers: Mapping[str, Writer] = field(factory=dict)
    resources: Mapping[str, str] = field(factory=dict)
    register_tainted: bool | None = None

    def __attrs_post_init__(self) -> None:
        faults = [*self._unknown(), *self._twice(), *self._invalid(), *self._too_early()]
        if faults:
            raise ValueError("; ".join(faults))

    def registers_tainted(self, publishes: bool, kind: str) -> bool:
        """Whether the kubelet is to register the Node with Trackbed's taint. ``kind``: the distribution of the kubelet."""
        if self.register_tainted is not None:
            return self.register_tainted
        return publishes and kind == KUBEADM

    def writer(self, key: str) -> Writer:
        """The writer of a label."""
        return self.writers.get(key, "reporter")

    def resource(self, capability: Capability) -> str | None:
        """The resource of the plugin that the label selects."""
        return self.resources.get(capability.key, capability.resource)

    def _unknown(self) -> list[str]:
        known = ", ".join(CAPABILITIES)
        faults = [
            f"capabilities: {key!r} is not a capability ({known}); give it in policy"
            for key in self.capabilities
            if key not in CAPABILITIES
        ]
        labels = {*self.capabilities, *self.policy}
        faults += [
            f"writers: {key!r} is in neither capabilities nor policy; remove it"
            for key in self.writers
            if key not in labels
        ]
        plugins = [key for key in self.capabilities if key in CAPABILITIES and CAPABILITIES[key].role == "plugin"]
        faults += [
            f"resources: {key!r} does not select a device plugin; remove it ({', '.join(plugins) or 'none'} do)"
            for key in self.resources
            if key not in plugins
        ]
        return faults + [
            f"resources: {name!r} is not a resource; give it as 'rdma/hca_shared_devices_b'"
            for name in self.resources.values()
            if not EXTENDED_RESOURCE.fullmatch(name)
        ]

    def _twice(self) -> list[str]:
        return [
            f"policy: {key!r} is in capabilities, too; remove it from one of the two"
            for key in self.policy
            if key in self.capabilities
        ]

    def _invalid(self) -> list[str]:
        values = {**{key: CAPABILITIES[key].value for key in self.capabilities if key in CAPABILITIES}, **self.policy}
        faults = (fault(key, value, self.writer(key)) for key, value in values.items())
        size = len(_features([(key, value) for key, value in values.items() if self.writer(key) == "nfd"]))
        too_large = [f"NFD's file would have {size} bytes, and NFD reads at most {NFD_LIMIT}; give it fewer labels"]
        return [each for each in faults if each] + (too_large if size > NFD_LIMIT else [])

    def _too_early(self) -> list[str]:
        return [
            f"writers: {key!r} selects a device plugin, and {writer!r} would write it before the node is ready; "
            "remove it, so that the reporter writes it"
            for key, writer in self.writers.items()
            if writer != "reporter" and key in CAPABILITIES and CAPABILITIES[key].role == "plugin"
        ]


LABELS_KEY = Key[Labels | None]("labels", None, record(Labels))


def labels_of(wanted: Labels, hardware: Hardware) -> tuple[Label, ...]:
    """The labels of a node with this hardware, sorted by key."""
    rules = (CAPABILITIES[key] for key in wanted.capabilities)
    labels = [Label(rule.key, rule.value, rule.role, wanted.resource(rule)) for rule in rules if rule.has(hardware)]
    labels += [Label(key, value) for key, value in wanted.policy.items()]
    return tuple(sorted(labels, key=lambda label: label.key))


def left_to_nfd(key: str, value: str) -> bool:
    """Whether NFD publishes a label of the reporter's on a node whose reporter publishes nothing.

    It does not know when the node is ready, so it gets none that selects a device plugin.
    """
    capability = CAPABILITIES.get(key)
    return fault(key, value, "nfd") is None and (capability is None or capability.role != "plugin")


def texts(wanted: Labels, hardware: Hardware, publishes: bool) -> dict[str, str]:
    """The files for the reporter and NFD on a node with this hardware, by path.

    :param publishes: whether the reporter publishes to Kubernetes. If not, NFD gets those of its labels that it may publish.
    """
    labels = labels_of(wanted, hardware)
    of_reporter = [label for label in labels if wanted.writer(label.key) == "reporter"]
    left = [] if publishes else [label for label in of_reporter if left_to_nfd(label.key, label.value)]
    published = [label for label in of_reporter if label not in left]
    document = {"labels": list(map(asdict, published))}
    files = {LABELS: json.dumps(document, indent=2) + "\n"}
    given = [label for label in labels if label in left or wanted.writer(label.key) == "nfd"]
    if features := _features([(label.key, label.value) for label in given]):
        files[NFD] = features
    return files


def registration(labels: list[Label], tainted: bool, operator_arguments: str) -> dict[str, str]:
    """The files for the kubelet's registration of the Node, by path; empty if there is nothing to register."""
    pairs = ",".join(f"{label.key}={label.value}" for label in labels)
    arguments = [f"--node-labels={pairs}"] if pairs else []
    arguments += [f"--register-with-taints={TAINT}"] if tainted else []
    if not arguments:
        return {}
    line = " ".join(filter(None, (operator_arguments, *arguments)))
    return {ENVIRONMENT: f"{HEADER}KUBELET_EXTRA_ARGS={quoted(line)}\n", DROP_IN: DROP_IN_TEXT}


def _features(labels: list[tuple[str, str]]) -> str:
    return HEADER + "".join(f"{key}={value}\n" for key, value in labels) if labels else ""


def _warn_of_unpublished(wanted: Labels, hardware: Hardware, warned: list[str]) -> None:
    labels = labels_of(wanted, hardware)
    lost = [
        each.key for each in labels if wanted.writer(each.key) == "reporter" and not left_to_nfd(each.key, each.value)
    ]
    if lost and lost != warned:
        warned[:] = lost
        warn(
            host,
            f"{LABELS_KEY.name}: nobody publishes {', '.join(lost)}: without the key {KUBERNETES.name} the reporter does not, "
            f"and NFD may not; give {KUBERNETES.name}, or give them another writer",
        )


@deploy("Labels")
def publish() -> None:
    """Write the files for the reporter, NFD and the kubelet; without the key `labels`, at most the taint of the registration.

    `hardware.settle` must come before: VFs and their RDMA devices exist only after the agent's first pass.

    :raises DeployError: this kubelet takes its labels and taints from elsewhere, or the cluster refuses a label.
    """
    wanted = LABELS_KEY.here()
    publishes = KUBERNETES.here() is not None
    if wanted and publishes:
        published = [key for key in (*wanted.capabilities, *wanted.policy) if wanted.writer(key) == "reporter"]
        if refused := refused_of_reporters(published):
            raise DeployError(f"{host.name}.{LABELS_KEY.name}: {refused}")
    kind, where = _kubelet_kind(host_data().get("kubelet"))
    tainted = (wanted or Labels()).registers_tainted(publishes, kind)
    if wanted and kind != KUBEADM and (tainted or "kubelet" in wanted.writers.values()):
        raise DeployError(
            f"{host.name}.{LABELS_KEY.name}: the kubelet of {kind} takes its first labels and taints from its own "
            f"{where}; give them there, and remove register_tainted and the writer 'kubelet' here"
        )
    write(name="Files", wanted=wanted, tainted=tainted, publishes=publishes, warned=[])


def _kubelet_kind(value: object) -> tuple[str, str]:
    """The kubelet's distribution by the inventory's key `kubelet`, and where it takes its first labels and taints from."""
    kubelet = value if isinstance(value, dict) else {}
    distribution, unit = str(kubelet.get("distribution", KUBEADM)), kubelet.get("unit")
    if distribution != KUBEADM:
        return distribution, "config.yaml (node-label, node-taint)"
    if unit not in (None, UNIT):
        return str(unit), "arguments and configuration (--node-labels, registerWithTaints)"
    return KUBEADM, DROP_IN


def _warn_of_lost_taints(others: list[str]) -> None:
    if others and host.state.is_executing:
        warn(
            host,
            f"labels.register_tainted: if this Node is registered anew, it lacks its taints {', '.join(others)}: the kubelet "
            "uses only the last --register-with-taints, which is Trackbed's; give it these and "
            f"{TAINT} in KUBELET_EXTRA_ARGS (/etc/default/kubelet, /etc/sysconfig/kubelet)",
        )


_TAINTS = re.compile(r"(?:^|\s)--register-with-taints(?:=|\s+)(\S*)")


@operation()
def write(wanted: Labels | None, tainted: bool, publishes: bool, warned: list[str]) -> Commands:
    """Write the files that differ, and remove those that are not wanted. ``warned``: what was said while pyinfra prepares."""
    have = host.get_fact(Texts, paths=PATHS)
    want: dict[str, str] = {}
    registered: list[Label] = []
    if wanted is not None:
        hardware = here()
        if hardware is None:
            yield refuse(UNKNOWN)
            return
        want = texts(wanted, hardware, publishes)
        if not publishes:
            _warn_of_unpublished(wanted, hardware, warned)
        registered = [label for label in labels_of(wanted, hardware) if wanted.writer(label.key) == "kubelet"]
    if tainted or registered:
        kubelet = host.get_fact(NodeKubelet)
        operator_taints = _TAINTS.search(kubelet.arguments)
        has_taint = tainted and operator_taints is not None and names.TAINT in operator_taints[1]
        want |= registration(registered, tainted and not has_taint, kubelet.arguments)
        if DROP_IN in want and kubelet.passes_them_on is False:
            yield refuse(
                "labels: the kubelet's unit does not use KUBELET_EXTRA_ARGS, so the kubelet cannot get labels or a taint; "
                "add $KUBELET_EXTRA_ARGS to its ExecStart=, or make the writer of its labels 'reporter' and "
                "labels.register_tainted False"
            )
            return
        if tainted and operator_taints is not None and not has_taint:
            yield refuse(
                "labels.register_tainted: KUBELET_EXTRA_ARGS of the node has --register-with-taints already, and the kubelet "
                f"uses only one; add {TAINT} to it where it is set (/etc/default/kubelet, /etc/sysconfig/kubelet, or "
                "Environment= of the unit), or remove it there"
            )
            return
        if tainted and not has_taint:
            _warn_of_lost_taints([each for each in kubelet.taints if each != TAINT])
    if have == want:
        host.noop("the labels' files are up to date")
        return
    reload = have.get(DROP_IN) != want.get(DROP_IN)
    if reload and systemd_reload.deferred("the kubelet's arguments for its labels"):
        return
    # No restart: the kubelet uses these arguments only when it registers the Node.
    yield from replace(have, want, systemd_reload.RELOAD if reload else "")
