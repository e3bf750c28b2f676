"""Pure functions: which pods a drain evicts, which stay, and which forbid the drain. The rules are those of kubectl drain."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen
from lightkube.models.core_v1 import Volume
from lightkube.models.meta_v1 import OwnerReference
from lightkube.resources.core_v1 import Pod

from fleet.objects import annotations_of, metadata_of

MIRROR = "kubernetes.io/config.mirror"
"""Annotation of the API object of a static pod. The kubelet runs that from a file, so deleting the object has no effect."""

FINISHED = ("Succeeded", "Failed")


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


def drain(pods: Iterable[Pod], rules: Rules) -> Drain:
    """Decide which of a node's pods to evict: all but static and finished ones and those of DaemonSets."""
    evict = [pod for pod in pods if not (_is_mirror(pod) or _is_daemon(pod) or _is_finished(pod))]
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


def _local_data(pod: Pod) -> list[str]:
    """The names of a pod's emptyDir volumes on disk. One in memory or huge pages is for sharing, and is never kept."""
    volumes: Iterable[Volume] = (pod.spec.volumes if pod.spec else None) or ()
    return [volume.name for volume in volumes if volume.emptyDir and not volume.emptyDir.medium]
