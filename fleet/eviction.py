"""Which pods of a node a drain evicts, which it leaves alone, and which forbid it: pure. The terms are kubectl drain's."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen
from lightkube.models.core_v1 import Volume
from lightkube.resources.core_v1 import Pod

from fleet.objects import annotations_of, metadata_of

MIRROR = "kubernetes.io/config.mirror"
"""Annotation of the API's image of a static pod, which the kubelet runs from a file: to delete it changes nothing."""

FINISHED = ("Succeeded", "Failed")


@frozen
class Rules:
    """What a drain may do. ``force``: evict pods that nothing would start again; ``delete_emptydir_data``: lose local data."""

    force: bool = False
    delete_emptydir_data: bool = False


@frozen
class Drain:
    """What a drain has to do: the pods to evict, and why it cannot be done at all."""

    evict: tuple[Pod, ...]
    blockers: tuple[str, ...]


def drain(pods: Iterable[Pod], rules: Rules) -> Drain:
    """Decide about a node's pods: those of DaemonSets, static pods and finished ones stay."""
    evict = [pod for pod in pods if not (_is_mirror(pod) or _is_daemon(pod) or _is_finished(pod))]
    blockers = []
    for pod in evict:
        if is_terminating(pod):
            continue
        if not rules.force and not metadata_of(pod).ownerReferences:
            blockers.append(
                f"{say(pod)} has no controller, so nothing would start it again; delete it, or give --force"
            )
        if not rules.delete_emptydir_data and (names := _local_data(pod)):
            blockers.append(
                f"{say(pod)} has local data (emptyDir {', '.join(names)}), which goes with it; give --delete-emptydir-data"
            )
    return Drain(tuple(evict), tuple(blockers))


def say(pod: Pod) -> str:
    """A pod's namespace and name."""
    return f"{metadata_of(pod).namespace}/{metadata_of(pod).name}"


def is_terminating(pod: Pod) -> bool:
    """Whether it is on its way out."""
    return metadata_of(pod).deletionTimestamp is not None


def _is_mirror(pod: Pod) -> bool:
    return MIRROR in annotations_of(pod)


def _is_daemon(pod: Pod) -> bool:
    return any(owner.kind == "DaemonSet" and owner.controller for owner in metadata_of(pod).ownerReferences or ())


def _is_finished(pod: Pod) -> bool:
    return pod.status is not None and pod.status.phase in FINISHED


def _local_data(pod: Pod) -> list[str]:
    """Its emptyDir volumes on disk; one in memory is for sharing, and ends with its processes anyway."""
    volumes: Iterable[Volume] = (pod.spec.volumes if pod.spec else None) or ()
    return [volume.name for volume in volumes if volume.emptyDir and volume.emptyDir.medium != "Memory"]
