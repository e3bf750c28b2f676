"""Rules for Kubernetes names: the labels a Node may have, who may write which (API server, kubelet, NFD), and resources."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

Writer = Literal["reporter", "nfd", "kubelet"]

OURS = "trackbed.internal"
"""The prefix of the reporter's own labels."""

# k8s.io/apimachinery, pkg/util/validation: IsQualifiedName, IsValidLabelValue, IsDNS1123Subdomain.
_NAME = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)")
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LONGEST_PREFIX = 253

EXTENDED_RESOURCE = re.compile(rf"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/{_NAME.pattern}")
"""DOMAIN/NAME, such as rdma/hca_shared_devices_b."""

# k8s.io/kubelet, pkg/apis/well_known_labels.go. A namespace includes its subdomains.
_KUBELET_KEYS = frozenset(
    {
        *("kubernetes.io/hostname", "kubernetes.io/os", "kubernetes.io/arch"),
        *("beta.kubernetes.io/os", "beta.kubernetes.io/arch", "beta.kubernetes.io/instance-type"),
        *("topology.kubernetes.io/zone", "topology.kubernetes.io/region", "node.kubernetes.io/instance-type"),
        *("failure-domain.beta.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/region"),
    }
)
_KUBELET_NAMESPACES = ("kubelet.kubernetes.io", "node.kubernetes.io")
_NODE_RESTRICTION = "node-restriction.kubernetes.io"

_ELSEWHERE = "set it from elsewhere (kubectl label node), or give another key"

_REPORTER_NAMESPACE = "feature.node.kubernetes.io"

# node-feature-discovery, pkg/apis/nfd/validate: the only namespaces of kubernetes.io that it accepts, with their subdomains.
_NFD_NAMESPACES = ("feature.node.kubernetes.io", "profile.node.kubernetes.io")


def fault(key: str, value: str, writer: Writer) -> str | None:
    """The reason why the writer may not write this label, and the remedy; None if it may."""
    if malformed := _malformed(key, value) or _reserved(key):
        return malformed
    if writer == "reporter":
        return None
    return _nfd(key) if writer == "nfd" else _kubelet(key)


def refused_of_reporters(keys: Iterable[str]) -> str | None:
    """The keys that fleet/cluster/nodes-policy.yaml refuses of a reporter, and the remedy; None: it refuses none of them."""
    refused = [
        key
        for key in sorted(keys)
        if (_below(key, "kubernetes.io") or _below(key, "k8s.io")) and key.rpartition("/")[0] != _REPORTER_NAMESPACE
    ]
    if not refused:
        return None
    return (
        f"{', '.join(refused)}: of kubernetes.io and k8s.io a reporter may set only labels of {_REPORTER_NAMESPACE}. The API "
        f"server would refuse all else that is published of a ready node together with another one; {_ELSEWHERE}"
    )


def _malformed(key: str, value: str) -> str | None:
    prefix, slash, name = key.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and not (_PREFIX.fullmatch(prefix) and len(prefix) <= _LONGEST_PREFIX)):
        return (
            f"{key!r} is not a label key; give up to 63 letters, digits, '-', '_' or '.', with a letter or digit first and "
            "last, optionally after a DNS name and '/'"
        )
    if value and not _NAME.fullmatch(value):
        return (
            f"{key}: {value!r} is not a label value; give up to 63 letters, digits, '-', '_' or '.', with a letter or digit "
            "first and last"
        )
    return None


def _reserved(key: str) -> str | None:
    if _below(key, OURS):
        return f"{key}: the reporter itself writes the labels of {OURS}; give another key"
    if _below(key, _NODE_RESTRICTION):
        return f"{key}: a node may not set labels of {_NODE_RESTRICTION}; set it from elsewhere (kubectl label node)"
    if key in _KUBELET_KEYS:
        return f"{key}: the kubelet or the cloud's controller writes this label; remove it here"
    return None


def _nfd(key: str) -> str | None:
    if "/" not in key:
        return f"{key}: NFD accepts only keys with a prefix; give it one, or make its writer 'reporter'"
    if _below(key, "kubernetes.io") and not any(_below(key, namespace) for namespace in _NFD_NAMESPACES):
        return f"{key}: of kubernetes.io NFD accepts only {' and '.join(_NFD_NAMESPACES)}; {_ELSEWHERE}"
    return None


def _kubelet(key: str) -> str | None:
    reserved = _below(key, "kubernetes.io") or _below(key, "k8s.io")
    if reserved and not any(_below(key, namespace) for namespace in _KUBELET_NAMESPACES):
        return (
            f"{key}: of kubernetes.io and k8s.io a kubelet may set only labels of {' and '.join(_KUBELET_NAMESPACES)}, and "
            f"does not start with another; {_ELSEWHERE}"
        )
    return None


def _below(key: str, namespace: str) -> bool:
    prefix, _, _ = key.rpartition("/")
    return prefix == namespace or prefix.endswith(f".{namespace}")
