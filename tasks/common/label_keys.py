"""Which labels a Node may have, and who may write which: the API server's rules, the kubelet's and NFD's."""

from __future__ import annotations

import re
from typing import Literal

Writer = Literal["reporter", "nfd", "kubelet"]

OURS = "trackbed.internal"
"""The prefix of the labels that the reporter keeps by itself."""

# k8s.io/apimachinery, pkg/util/validation: IsQualifiedName, IsValidLabelValue, IsDNS1123Subdomain.
_NAME = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)")
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LONGEST_PREFIX = 253

# k8s.io/kubelet, pkg/apis/well_known_labels.go; the last two are namespaces, with all below them.
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

# node-feature-discovery, pkg/apis/nfd/validate: of kubernetes.io it takes these two alone, with all below them.
_NFD_NAMESPACES = ("feature.node.kubernetes.io", "profile.node.kubernetes.io")


def fault(key: str, value: str, writer: Writer) -> str | None:
    """What is wrong with a label, and the remedy; None if it may be written so."""
    return _malformed(key, value) or _others(key) or {"reporter": _no, "nfd": _nfd, "kubelet": _kubelet}[writer](key)


def _malformed(key: str, value: str) -> str | None:
    prefix, slash, name = key.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and not (_PREFIX.fullmatch(prefix) and len(prefix) <= _LONGEST_PREFIX)):
        return (
            f"{key!r} is no label key; give up to 63 letters, digits, '-', '_' or '.', with a letter or digit first and last, "
            "and before it a DNS name and '/' if you like"
        )
    if value and not _NAME.fullmatch(value):
        return (
            f"{key}: {value!r} is no label value; give up to 63 letters, digits, '-', '_' or '.', with a letter or digit "
            "first and last"
        )
    return None


def _others(key: str) -> str | None:
    if _below(key, OURS):
        return f"{key}: labels of {OURS} are the reporter's own; give another key"
    if _below(key, _NODE_RESTRICTION):
        return (
            f"{key}: such labels are those that a node cannot give itself; set it from elsewhere (kubectl label node)"
        )
    if key in _KUBELET_KEYS:
        return f"{key}: the kubelet or the cloud's controller writes this one; take it out"
    return None


def _no(_: str) -> None:
    return None


def _nfd(key: str) -> str | None:
    if "/" not in key:
        return f"{key}: NFD takes no key without a prefix; give it one, or make its writer 'reporter'"
    if _below(key, "kubernetes.io") and not any(_below(key, namespace) for namespace in _NFD_NAMESPACES):
        return f"{key}: of kubernetes.io NFD takes {' and '.join(_NFD_NAMESPACES)} alone; make its writer 'reporter'"
    return None


def _kubelet(key: str) -> str | None:
    reserved = _below(key, "kubernetes.io") or _below(key, "k8s.io")
    if reserved and not any(_below(key, namespace) for namespace in _KUBELET_NAMESPACES):
        return (
            f"{key}: a kubelet may not give itself labels of kubernetes.io and k8s.io, but for those of "
            f"{' and '.join(_KUBELET_NAMESPACES)}, and does not start with it; make its writer 'reporter'"
        )
    return None


def _below(key: str, namespace: str) -> bool:
    prefix, _, _ = key.rpartition("/")
    return prefix == namespace or prefix.endswith(f".{namespace}")
