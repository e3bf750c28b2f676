"""The labels of the Node: what the node can do, by rule from what it has, and what the inventory says of it.

Each key has one writer. The reporter publishes what is in LABELS once the node's first pass is verified, and is the only one
that may write a key that selects a device plugin: the kubelet gives its labels when it registers the Node, and NFD whenever it
looks, both before anybody knows that the node is ready.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from attrs import field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.reporter.settings import Label, Role
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, host_data, record
from tasks.common.label_keys import Writer, fault
from tasks.common.texts import Texts, place
from tasks.hardware import MELLANOX, UNKNOWN, Hardware, NodeHardware

LABELS = "/etc/trackbed/labels.json"
NFD = "/etc/kubernetes/node-feature-discovery/features.d/trackbed"
UNIT = "kubelet.service"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/30-trackbed-registration.conf"
ENVIRONMENT = "/etc/trackbed/kubelet-registration.env"

# NFD: source/local, MaxFeatureFileSize.
NFD_LIMIT = 65536
HEADER = "# Written by Trackbed; changes here are overwritten.\n"
TAINT_KEY = "readiness.k8s.io/trackbed"
TAINT = f"{TAINT_KEY}:NoSchedule"
KUBEADM = "kubeadm"
PUBLISHER = "kubernetes"
"""The inventory's key without which nobody would lift the taint."""

PATHS = (LABELS, NFD, ENVIRONMENT, DROP_IN)

# kubeadm's unit reads KUBELET_EXTRA_ARGS from /etc/default/kubelet (Debian) or /etc/sysconfig/kubelet (RPM); ours comes later.
DROP_IN_TEXT = f"{HEADER}[Service]\nEnvironmentFile={ENVIRONMENT}\n"


@frozen
class Capability:
    """A label that a node has if ``has`` says so of its hardware.

    ``role``: ``plugin`` if a device plugin's DaemonSet selects its nodes by it. ``resource``: what that plugin makes
    allocatable. ``default``: it is published unless the inventory gives a list; not so where others write the key as well.
    """

    key: str
    value: str
    has: Callable[[Hardware], bool]
    role: Role = "fact"
    resource: str | None = None
    default: bool = False


def _shared_hca(node: Hardware) -> bool:
    # What k8s-rdma-shared-dev-plugin asks of each device, or it leaves it out.
    ready = (device.offers("uverbs") and device.offers("umad") for function in node.hcas() for device in function.rdma)
    return node.rdma_cm and any(ready)


def _erdma(node: Hardware) -> bool:
    return any(function.is_erdma and function.rdma for function in node.functions)


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
        Capability("aliyun.accelerator/erdma", "true", _erdma, "plugin", "aliyun/erdma", default=True),
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
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


@frozen
class Labels:
    """The inventory's key.

    ``capabilities``: which of CAPABILITIES are published where a node has them. ``policy``: labels by the operator's own word.
    ``writers``: who writes a key, where it is not the reporter. ``resources``: what the plugin that a key selects makes
    allocatable, where it is not the usual. ``register_tainted``: the kubelet registers the Node with our taint; None: if a
    reporter publishes to Kubernetes, which lifts it, and the kubelet is one that can be told.
    """

    capabilities: tuple[str, ...] = DEFAULT
    policy: Mapping[str, str] = field(factory=dict)
    writers: Mapping[str, Writer] = field(factory=dict)
    resources: Mapping[str, str] = field(factory=dict)
    register_tainted: bool | None = None

    def __attrs_post_init__(self) -> None:
        faults = [*self._unknown(), *self._twice(), *self._refused(), *self._gating()]
        if faults:
            raise ValueError("; ".join(faults))

    def taints(self, publishes: bool, kind: str) -> bool:
        """Whether the kubelet, whose it is says ``kind``, is to register the Node with our taint."""
        if self.register_tainted is not None:
            return self.register_tainted
        return publishes and kind == KUBEADM

    def writer(self, key: str) -> Writer:
        """Who writes a key."""
        return self.writers.get(key, "reporter")

    def resource(self, capability: Capability) -> str | None:
        """What the plugin that it selects makes allocatable."""
        return self.resources.get(capability.key, capability.resource)

    def _unknown(self) -> list[str]:
        known = ", ".join(CAPABILITIES)
        faults = [
            f"capabilities: {key!r} is none that can be found by rule ({known}); give it in policy"
            for key in self.capabilities
            if key not in CAPABILITIES
        ]
        given = {*self.capabilities, *self.policy}
        faults += [
            f"writers: {key!r} is in neither capabilities nor policy; take it out"
            for key in self.writers
            if key not in given
        ]
        plugins = [key for key in self.capabilities if key in CAPABILITIES and CAPABILITIES[key].role == "plugin"]
        faults += [
            f"resources: {key!r} selects no device plugin; take it out ({', '.join(plugins) or 'none'} do)"
            for key in self.resources
            if key not in plugins
        ]
        return faults + [
            f"resources: {name!r} is no resource; give it as 'rdma/hca_shared_devices_b'"
            for name in self.resources.values()
            if not _RESOURCE.fullmatch(name)
        ]

    def _twice(self) -> list[str]:
        return [
            f"policy: {key!r} is found by rule; take it out of policy, or out of capabilities"
            for key in self.policy
            if key in self.capabilities
        ]

    def _refused(self) -> list[str]:
        values = {**{key: CAPABILITIES[key].value for key in self.capabilities if key in CAPABILITIES}, **self.policy}
        found = (fault(key, value, self.writer(key)) for key, value in values.items())
        size = len(_features([(key, value) for key, value in values.items() if self.writer(key) == "nfd"]))
        too_large = [f"NFD reads no file of more than {NFD_LIMIT} bytes, this one has {size}; give it fewer labels"]
        return [each for each in found if each] + (too_large if size > NFD_LIMIT else [])

    def _gating(self) -> list[str]:
        return [
            f"writers: {key!r} selects a device plugin, and {writer!r} would write it before the node is ready; "
            "take it out, the reporter writes it"
            for key, writer in self.writers.items()
            if writer != "reporter" and key in CAPABILITIES and CAPABILITIES[key].role == "plugin"
        ]


LABELS_KEY = Key[Labels | None]("labels", None, record(Labels))
KEYS = (LABELS_KEY,)


def labels_of(wanted: Labels, found: Hardware) -> tuple[Label, ...]:
    """The labels of a node that has this hardware, by key."""
    rules = (CAPABILITIES[key] for key in wanted.capabilities)
    made = [Label(rule.key, rule.value, rule.role, wanted.resource(rule)) for rule in rules if rule.has(found)]
    made += [Label(key, value) for key, value in wanted.policy.items()]
    return tuple(sorted(made, key=lambda label: label.key))


def texts(wanted: Labels, found: Hardware) -> dict[str, str]:
    """The files for the reporter and NFD on this hardware, by path."""
    labels = labels_of(wanted, found)
    published = [label for label in labels if wanted.writer(label.key) == "reporter"]
    document = {"labels": [{"key": e.key, "value": e.value, "role": e.role, "resource": e.resource} for e in published]}
    made = {LABELS: json.dumps(document, indent=2) + "\n"}
    if features := _features([(label.key, label.value) for label in labels if wanted.writer(label.key) == "nfd"]):
        made[NFD] = features
    return made


def registration(labels: list[Label], tainted: bool, others: str) -> dict[str, str]:
    """The files for the kubelet, by path; ``others``: its arguments that the operator gives."""
    given = ",".join(f"{label.key}={label.value}" for label in labels)
    arguments = [f"--node-labels={given}"] if given else []
    arguments += [f"--register-with-taints={TAINT}"] if tainted else []
    if not arguments:
        return {}
    every = " ".join(filter(None, (others, *arguments)))
    return {ENVIRONMENT: f"{HEADER}KUBELET_EXTRA_ARGS={_quoted(every)}\n", DROP_IN: DROP_IN_TEXT}


def _features(labels: list[tuple[str, str]]) -> str:
    return HEADER + "".join(f"{key}={value}\n" for key, value in labels) if labels else ""


def _quoted(text: str) -> str:
    # systemd.exec(5), EnvironmentFile=: within double quotes a backslash keeps these four.
    return '"' + re.sub(r'(["\\$`])', r"\\\1", text) + '"'


@frozen
class Kubelet:
    """The operator's KUBELET_EXTRA_ARGS, and whether the kubelet's unit (None: there is none) passes them on."""

    arguments: str
    passes_them_on: bool | None


_KUBELET = """
for f in "$1/etc/default/kubelet" "$1/etc/sysconfig/kubelet"; do
  if [ -r "$f" ]; then sed -n 's/^[[:space:]]*KUBELET_EXTRA_ARGS=/arguments /p' "$f"; fi
done
if unit=$(systemctl cat kubelet.service 2>/dev/null); then
  case "$unit" in *KUBELET_EXTRA_ARGS*) echo passes ;; *) echo drops ;; esac
fi
"""


class NodeKubelet(FactBase[Kubelet]):
    """How the kubelet of the node is started."""

    @staticmethod
    def default() -> Kubelet:
        """No kubelet yet: kubeadm's package comes with the unit that we mean."""
        return Kubelet("", None)

    def command(self) -> StringCommand:
        """Read the files that kubeadm's unit reads, and ask systemd for the unit."""
        return script(_KUBELET, "")

    def process(self, output: list[str]) -> Kubelet:
        """A line for each file that gives arguments, and one for the unit."""
        given = [line.removeprefix("arguments ") for line in output if line.startswith("arguments")]
        unit = {"passes": True, "drops": False}
        told = next((unit[line] for line in output if line in unit), None)
        return Kubelet(_unquoted(given[-1]) if given else "", told)


def _unquoted(text: str) -> str:
    quoted = re.fullmatch(r'\s*"(.*)"\s*|\s*\'(.*)\'\s*', text)
    if quoted is None:
        return text.strip()
    return quoted[2] if quoted[1] is None else re.sub(r"\\(.)", r"\1", quoted[1])


@deploy("Labels")
def publish() -> None:
    """Write what the reporter, NFD and the kubelet are to publish.

    Without the key `labels` that is at most the taint of the first registration. Needs `hardware.settle` before it: VFs and
    their RDMA devices come with the agent's first pass.

    :raises DeployError: the kubelet is one that takes no arguments of ours.
    """
    wanted = LABELS_KEY.here()
    kind, where = _kubelet_kind(host_data().get("kubelet"))
    tainted = (wanted or Labels()).taints(host_data().get(PUBLISHER) is not None, kind)
    if wanted and kind != KUBEADM and (tainted or "kubelet" in wanted.writers.values()):
        raise DeployError(
            f"{host.name}.{LABELS_KEY.name}: the kubelet of {kind} takes its first labels and taints from its own "
            f"{where}; give them there, and neither register_tainted nor the writer 'kubelet' here"
        )
    write(name="Files", wanted=wanted, tainted=tainted)


def _kubelet_kind(given: object) -> tuple[str, str]:
    """Whose kubelet it is by the inventory's key `kubelet`, and where it is told of its first labels and taints."""
    kubelet = given if isinstance(given, dict) else {}
    distribution, unit = str(kubelet.get("distribution", KUBEADM)), kubelet.get("unit")
    if distribution != KUBEADM:
        return distribution, "config.yaml (node-label, node-taint)"
    if unit not in (None, UNIT):
        return str(unit), "arguments and configuration (--node-labels, registerWithTaints)"
    return KUBEADM, DROP_IN


_TAINTS = re.compile(r"(?:^|\s)--register-with-taints(?:=|\s+)(\S*)")


@operation()
def write(wanted: Labels | None, tainted: bool) -> Commands:
    """Write the files that differ, and remove those that are not wanted."""
    have = host.get_fact(Texts, paths=PATHS)
    want: dict[str, str] = {}
    first: list[Label] = []
    if wanted is not None:
        found = host.get_fact(NodeHardware)
        if found is None:
            yield refuse(UNKNOWN)
            return
        want = texts(wanted, found)
        first = [label for label in labels_of(wanted, found) if wanted.writer(label.key) == "kubelet"]
    if tainted or first:
        kubelet = host.get_fact(NodeKubelet)
        theirs = _TAINTS.search(kubelet.arguments)
        given = tainted and theirs is not None and TAINT_KEY in theirs[1]
        want |= registration(first, tainted and not given, kubelet.arguments)
        if DROP_IN in want and kubelet.passes_them_on is False:
            yield refuse(
                "labels: the kubelet's unit does not pass KUBELET_EXTRA_ARGS on, so it cannot be given labels or a taint; "
                "make the writer of its keys 'reporter' and labels.register_tainted False, or add $KUBELET_EXTRA_ARGS to "
                "ExecStart="
            )
            return
        if tainted and theirs is not None and not given:
            yield refuse(
                "labels.register_tainted: KUBELET_EXTRA_ARGS of the node has --register-with-taints already, and the kubelet "
                f"takes one; add {TAINT} to it in /etc/default/kubelet or /etc/sysconfig/kubelet, or remove it there"
            )
            return
    if have == want:
        host.noop("the labels' files are as they should be")
        return
    for path in PATHS:
        yield from place(path, have.get(path, ""), want.get(path, ""))
    if have.get(DROP_IN) != want.get(DROP_IN):
        # No restart: the kubelet reads them when it registers the Node, and never again.
        yield StringCommand("systemctl", "daemon-reload")
