"""Pure functions: which pods a drain evicts, which stay, and what forbids the drain. The rules are those of kubectl drain."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any

from attrs import frozen
from lightkube import ApiError
from lightkube.models.core_v1 import Toleration, Volume
from lightkube.models.meta_v1 import LabelSelector, ObjectMeta, OwnerReference
from lightkube.models.policy_v1 import PodDisruptionBudgetSpec
from lightkube.resources.core_v1 import Pod
from lightkube.resources.policy_v1 import PodDisruptionBudget

from fleet.api import NO_LEADER, Failed, code
from fleet.objects import annotations_of, labels_of, metadata_of
from fleet.reading import ALL, read

MIRROR = "kubernetes.io/config.mirror"
"""Annotation of the API object of a static pod. The kubelet runs that from a file, so deleting the object has no effect."""

CORDON = ("node.kubernetes.io/unschedulable", "NoSchedule")
"""Key and effect of the taint that a cordoned Node gets."""

FINISHED = ("Succeeded", "Failed")

REFUSED = (409, 429, NO_LEADER)
"""HTTP status codes of an eviction that is refused for now (pkg/registry/core/pod/storage/eviction.go): others write the pod or
its PodDisruptionBudget, or another pod has its name by now; the budget forbids it; an admission webhook does not answer, or
etcd has no leader."""

SEVERAL_BUDGETS = "more than one PodDisruptionBudget"
"""What a refusal with 500 says if several budgets cover the pod, which does not pass."""

DENIED = re.compile('admission webhook "[^"]*" denied the request')
"""What a refusal says if an admission webhook gives it, with a status code of the webhook's choice (ToStatusErr,
staging/src/k8s.io/apiserver/pkg/admission/plugin/webhook/errors/statuserror.go): another operator moves the pod first."""

TERMINATING = "NamespaceTerminating"
"""The cause that a refusal (403) names if the pod's namespace is being deleted. The pod will end without an eviction
(NamespaceTerminatingCause, staging/src/k8s.io/api/core/v1/types.go)."""


NAMED = {"name": ALL, "namespace": ALL}
"""The fields of an object's metadata that name it."""


class CannotDrain(Failed):
    """Pods cannot be evicted; the message says which, and the remedy."""


@frozen
class Rules:
    """What a drain may do. ``force``: evict pods without a controller. ``delete_emptydir_data``: delete local data."""

    force: bool = False
    delete_emptydir_data: bool = False


@frozen
class Drain:
    """The pods to evict, and the reasons that forbid the drain."""

    evict: tuple[Pod, ...]
    blockers: tuple[str, ...]


def read_pod(document: Mapping[str, Any]) -> Pod:
    """Read what a drain asks of a pod.

    :raises CannotDrain: it cannot be read.
    """
    pod, fault = read(document, Pod)
    if pod is None:
        raise CannotDrain(f"{document['metadata']['name']} cannot be read: {fault}")
    return pod


def drain(pods: Iterable[Pod], rules: Rules, since: datetime | None = None) -> Drain:
    """Decide which of a node's pods to evict: all but static and finished ones and those of DaemonSets.

    :param since: when the drain began. A pod that tolerates the cordon, and was made later, stays: evicted, it would come back.
    """
    evict = [
        pod
        for pod in pods
        if not (_is_mirror(pod) or _is_daemon(pod) or _is_finished(pod) or _has_come_back(pod, since))
    ]
    blockers = []
    for pod in evict:
        if is_terminating(pod):
            continue
        if not rules.force and _controller(pod) is None:
            blockers.append(
                f"{full_name(pod)} has no controller, so nothing would start it again; delete it, or give --force"
            )
        if not rules.delete_emptydir_data and (names := _local_data(pod)):
            blockers.append(
                f"{full_name(pod)} has local data (emptyDir {', '.join(names)}), which is lost; give --delete-emptydir-data"
            )
    return Drain(tuple(evict), tuple(blockers))


def why_not_now(error: ApiError) -> str:
    """Why the API server refuses an eviction that may be tried again; empty for any other error."""
    causes = (error.status.details.causes if error.status.details else None) or ()
    said = error.status.message or "refused"
    passes = code(error) in REFUSED or DENIED.search(said) or any(cause.reason == TERMINATING for cause in causes)
    if SEVERAL_BUDGETS in said or not passes:
        return ""
    return " ".join([said, *(cause.message for cause in causes if cause.message)])


def forbidding(budgets: Iterable[Mapping[str, Any]], pods: Collection[Pod]) -> list[str]:
    """Which PodDisruptionBudgets the eviction of all these pods at once would violate, and why.

    One that cannot be read allows nothing. If its selector cannot be read either, it counts for its whole namespace.
    """
    found = []
    for document in budgets:
        budget, fault = _read_budget(document)
        metadata, status, spec = budget.metadata or ObjectMeta(), budget.status, budget.spec
        covered = [
            full_name(pod)
            for pod in pods
            if metadata_of(pod).namespace == metadata.namespace
            and _selects(spec.selector if spec else None, labels_of(pod))
            and not _is_unguarded(pod, budget)
        ]
        # As the eviction API: a status of an earlier generation allows nothing.
        current = status is not None and (status.observedGeneration or 0) >= (metadata.generation or 0)
        allowed = (status.disruptionsAllowed or 0) if status is not None and current else 0
        if len(covered) > allowed:
            said = f"cannot be read ({fault}), so it may forbid" if fault else f"allows {allowed} disruptions now, not"
            found.append(
                f"the PodDisruptionBudget {metadata.namespace}/{metadata.name} {said} that of {', '.join(covered)}"
            )
    return found


def _read_budget(document: Mapping[str, Any]) -> tuple[PodDisruptionBudget, str]:
    """A budget, and why it cannot be read; then what is known of it."""
    budget, fault = read(document, PodDisruptionBudget)
    if budget is not None:
        return budget, ""
    selecting, _ = read(document, PodDisruptionBudget, {"metadata": NAMED, "spec": {"selector": ALL}})
    if selecting is not None:
        return selecting, fault
    metadata = ObjectMeta(**{key: document["metadata"][key] for key in NAMED})
    return PodDisruptionBudget(metadata=metadata, spec=PodDisruptionBudgetSpec(selector=LabelSelector())), fault


def _is_unguarded(pod: Pod, budget: PodDisruptionBudget) -> bool:
    """Whether the eviction API evicts a pod whatever its budget allows (pkg/registry/core/pod/storage/eviction.go).

    A pod that is not ready is a disruption already.
    """
    if pod.status is None or pod.status.phase in ("Pending", *FINISHED):
        return True
    if any((each.type, each.status) == ("Ready", "True") for each in pod.status.conditions or ()):
        return False
    status = budget.status
    healthy, desired = (status.currentHealthy or 0, status.desiredHealthy or 0) if status else (0, 0)
    always = budget.spec is not None and budget.spec.unhealthyPodEvictionPolicy == "AlwaysAllow"
    return always or healthy >= desired > 0


def _selects(selector: LabelSelector | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects an object. An empty one selects all, and none selects nothing."""
    if selector is None or any(labels.get(key) != value for key, value in (selector.matchLabels or {}).items()):
        return False
    holds = {
        "In": lambda key, values: labels.get(key) in values,
        "NotIn": lambda key, values: labels.get(key) not in values,
        "Exists": lambda key, values: key in labels,
        "DoesNotExist": lambda key, values: key not in labels,
    }
    # What an operator of a later version of Kubernetes selects is not known.
    known = [each for each in selector.matchExpressions or () if each.operator in holds]
    return all(holds[each.operator](each.key, each.values or ()) for each in known)


def full_name(pod: Pod) -> str:
    """A pod's namespace and name."""
    return f"{metadata_of(pod).namespace}/{metadata_of(pod).name}"


def is_terminating(pod: Pod) -> bool:
    """Whether a pod is being deleted."""
    return metadata_of(pod).deletionTimestamp is not None


def _is_mirror(pod: Pod) -> bool:
    return MIRROR in annotations_of(pod)


def _is_daemon(pod: Pod) -> bool:
    controller = _controller(pod)
    return controller is not None and controller.kind == "DaemonSet"


def _controller(pod: Pod) -> OwnerReference | None:
    """What would start the pod again. Any other owner only has the pod deleted with itself."""
    return next((owner for owner in metadata_of(pod).ownerReferences or () if owner.controller), None)


def _is_finished(pod: Pod) -> bool:
    return pod.status is not None and pod.status.phase in FINISHED


def _has_come_back(pod: Pod, since: datetime | None) -> bool:
    made, tolerations = metadata_of(pod).creationTimestamp, (pod.spec.tolerations if pod.spec else None) or ()
    return since is not None and made is not None and made > since and any(map(_tolerates_cordon, tolerations))


def _tolerates_cordon(toleration: Toleration) -> bool:
    """Whether a pod with this toleration may start on a cordoned node.

    As ToleratesTaint in staging/src/k8s.io/api/core/v1/toleration.go.
    """
    key, effect = CORDON
    of_value = toleration.operator == "Exists" or not toleration.value
    return of_value and toleration.key in (None, "", key) and toleration.effect in (None, "", effect)


def _local_data(pod: Pod) -> list[str]:
    """The names of a pod's emptyDir volumes on disk. One in memory or huge pages is for sharing, and is never kept."""
    volumes: Iterable[Volume] = (pod.spec.volumes if pod.spec else None) or ()
    return [volume.name for volume in volumes if volume.emptyDir and not volume.emptyDir.medium]
