"""What the networks of pods need on every node, whatever its hardware: Multus, whereabouts, sriov-cni, rdma-cni.

They are in a folder of their own, which is applied first: Multus defines the kind NetworkAttachmentDefinition, and the API
server refuses objects of that kind until it is defined.
"""

from __future__ import annotations

from typing import Any

from tasks.common.facts import Lines
from tasks.common.templates import render
from tasks.kubernetes.manifests.device_plugins import DevicePlugins

FOLDER = "network-plugins"
_TEMPLATES = f"manifests/{FOLDER}"
_REPOSITORY = "github.com/k8snetworkplumbingwg"
PROGRAMS = {
    "sriov-cni": f"images/sriov-cni-daemonset.yaml of {_REPOSITORY}/sriov-cni v2.10.0",
    "rdma-cni": f"deployment/rdma-cni-daemonset.yaml of {_REPOSITORY}/rdma-cni v1.6.0",
}
"""The plugins whose images only copy a program to the node, by name: the source of what their DaemonSet needs."""

NAMES = ("multus", "whereabouts", *PROGRAMS)


class Displaced(Lines):
    """The configuration of Multus on a node, if Cilium has renamed it. Then pods get no networks, and nothing says why."""

    shell = 'ls "$1"/etc/cni/net.d/*multus*.cilium_bak 2>/dev/null || true'
    words = ("",)


def network_plugins(wanted: DevicePlugins) -> dict[str, str]:
    """The files of the folder, by their paths; none if none is wanted."""
    common: dict[str, Any] = {"namespace": wanted.namespace, "limits": wanted.limits}
    files: dict[str, str] = {}
    for name in NAMES:
        settings = getattr(wanted.network_plugins, name.replace("-", "_"))
        if settings is None:
            continue
        if name in PROGRAMS:
            text = render(
                f"{_TEMPLATES}/program.yaml.j2", settings=settings, program=name, source=PROGRAMS[name], **common
            )
        else:
            text = render(f"{_TEMPLATES}/{name}.yaml.j2", settings=settings, **common)
        files[f"{name}.yaml"] = text
    if files:
        files["kustomization.yaml"] = render("manifests/kustomization.yaml.j2", names=sorted(files))
    return {f"{FOLDER}/{name}": text for name, text in files.items()}
