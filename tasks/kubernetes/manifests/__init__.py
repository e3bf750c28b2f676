"""Renders the manifests of device plugins on the control host, from the hardware of all nodes, into the operator's folder.

Each node's hardware is kept in the folder (`nodes/HOST.json`), so that a deploy with `--limit` renders for all nodes.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

from attrs import define, evolve, field
from pyinfra.api.command import FunctionCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host

from tasks import nccl, node_spec
from tasks.common.commands import Commands, fail, refuse, warn
from tasks.common.connection import deploys_itself
from tasks.common.data import Key, record
from tasks.hardware import UNKNOWN, here
from tasks.kubernetes import KUBERNETES
from tasks.kubernetes.clusters import cluster_of
from tasks.kubernetes.kubelet import KUBELET
from tasks.kubernetes.labels import CAPABILITIES, LABELS_KEY
from tasks.kubernetes.manifests import network_plugins, test_pods
from tasks.kubernetes.manifests.device_plugins import DAEMON_SETS, DevicePlugins
from tasks.kubernetes.manifests.discovered import discover, read_nodes, to_text
from tasks.kubernetes.manifests.node_labels import possible_labels, published
from tasks.kubernetes.manifests.rendered import manifests
from tasks.kubernetes.manifests.selectors import Nodes
from tasks.nccl import NCCL

DEVICE_PLUGINS = Key[DevicePlugins | None]("device_plugins", None, record(DevicePlugins))


@deploy("Manifests")
def render() -> None:
    """Render the manifests; without the key `device_plugins`, or on a node that deploys itself, do nothing.

    :raises DeployError: hosts with the same folder have different values of the key, hosts of one cluster have different
        folders, a value contradicts the labels, or the folder is no path.
    """
    wanted = DEVICE_PLUGINS.here()
    # The folder is on the control host. A node knows the hardware of no other.
    if wanted is None or deploys_itself(host):
        return
    _check_value(wanted)
    _check_labels(wanted)
    collect(name="Hardware of the node", wanted=wanted)
    # pyinfra's _run_once would write one folder only, although hosts may have different ones.
    write(name="Write", wanted=wanted)


# By deploy and folder: the names of the hosts with that folder, and their value of the key.
_sharing: WeakKeyDictionary[State, dict[Path, tuple[list[str], DevicePlugins]]] = WeakKeyDictionary()


def _check_value(wanted: DevicePlugins) -> None:
    """All hosts of a folder must have the same value."""
    known = _sharing.setdefault(host.state, {})
    try:
        folder = _folder(wanted.folder)
    except RuntimeError as error:
        raise DeployError(
            f"{host.name}.{DEVICE_PLUGINS.name}.folder: {wanted.folder} is no folder of this control host ({error}); give one"
        ) from None
    _check_cluster(folder)
    if folder not in known:
        kubelet = KUBELET.here()
        for warning in wanted.warnings(kubelet.distribution if kubelet else None):
            warn(host, f"{DEVICE_PLUGINS.name}.{warning}")
    sharing, others_value = known.setdefault(folder, ([], wanted))
    if evolve(others_value, folder=wanted.folder) != wanted:
        raise DeployError(
            f"{host.name}.{DEVICE_PLUGINS.name}: {sharing[0]} has another value for the same folder {wanted.folder}, where one "
            "set of manifests is made for both; give one value (group_data/all.py), or each cluster its own folder"
        )
    sharing.append(host.name)


# By deploy and folder: the hosts whose hardware was collected after a host wrote the manifests.
_unwritten: WeakKeyDictionary[State, dict[Path, set[str]]] = WeakKeyDictionary()


def _writes(folder: Path) -> bool:
    """For an operation: whether this host writes the folder's manifests, for all hosts whose hardware is collected.

    Once is enough, by the first host that has not failed: all hosts are collected then. With --serial they are not, and each
    host writes in its turn.
    """
    if not host.state.is_executing:
        sharing, _ = _sharing[host.state][folder]
        active = host.state.active_hosts
        return host.name == next(name for name in sharing if host.state.inventory.get_host(name) in active)
    unwritten = _unwritten[host.state][folder]
    if host.name not in unwritten:
        return False
    unwritten.clear()
    return True


@cache
def _folders(inventory: Inventory) -> dict[str, tuple[str, Path]]:
    """The first host of each cluster that has a folder, and that folder."""
    folders: dict[str, tuple[str, Path]] = {}
    for each in inventory:
        if made := _folder_of(each.data.get(DEVICE_PLUGINS.name)):
            folders.setdefault(cluster_of(each.data.get(KUBERNETES.name)), (each.name, made))
    return folders


def _check_cluster(folder: Path) -> None:
    """All hosts of a cluster, also those outside --limit, must have the same folder."""
    cluster = cluster_of(host.data.get(KUBERNETES.name))
    other, others_folder = _folders(host.state.inventory).get(cluster, (host.name, folder))
    if cluster and others_folder != folder:
        raise DeployError(
            f"{host.name}.{DEVICE_PLUGINS.name}.folder: {other} is in the same cluster, {cluster}, and has the folder "
            f"{others_folder}; objects of both folders have the same names, so those that are applied last would replace the "
            "others; give all hosts of a cluster one folder"
        )


def _check_labels(wanted: DevicePlugins) -> None:
    labels = LABELS_KEY.here()
    plugins = (("shared_rdma", wanted.shared_rdma, "rdma"), ("erdma", wanted.erdma, "aliyun.accelerator/erdma"))
    for name, plugin, key in plugins:
        if labels is None or plugin is None or key not in labels.capabilities:
            continue
        expected = labels.resource(CAPABILITIES[key])
        if expected != plugin.resource:
            raise DeployError(
                f"{host.name}.{DEVICE_PLUGINS.name}.{name}: the plugin's resource is {plugin.resource}, but labels.resources "
                f"has {expected} for {key!r}; give labels.resources {{{key!r}: {plugin.resource!r}}}"
            )


def _folder(given: str) -> Path:
    """The folder's path.

    :raises RuntimeError: there is no user of that name (~NAME), or symbolic links make a loop.
    """
    return (Path(host.state.cwd or ".") / Path(given).expanduser()).resolve()


def _nodes(wanted: DevicePlugins) -> Path:
    return _folder(wanted.folder) / "nodes"


def _is_of(data: Mapping[str, object], folder: Path) -> bool:
    """Whether a host's data name this folder."""
    return _folder_of(data.get(DEVICE_PLUGINS.name)) == folder


def _folder_of(given: object) -> Path | None:
    """The folder in a host's value of the key; None without the key, or if it is no path."""
    with suppress(RuntimeError):
        return _folder(str(given.get("folder", ""))) if isinstance(given, dict) else None
    return None


@define
class FileChanges:
    """Files on the control host to write, and files to remove."""

    write: dict[Path, str] = field(factory=dict)
    remove: list[Path] = field(factory=list)

    def command(self) -> FunctionCommand:
        """Make a command that writes and removes them."""
        return FunctionCommand(_put, (self,), {})


def _put(state: State, host: Host, files: FileChanges) -> bool:
    try:
        for path, text in files.write.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # A name of its own: deploys of several shards may write the same file.
            new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
            new.write_bytes(text.encode())
            new.replace(path)
        for path in files.remove:
            path.unlink(missing_ok=True)
    except OSError as error:
        where = error.filename2 or error.filename
        return fail(
            host,
            f"{DEVICE_PLUGINS.name}.folder: {where} cannot be written: {error.strerror}; make room for it there, or give "
            "another folder",
        )
    return True


def _differs(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() != text.encode()
    except OSError:
        return True


@operation()
def collect(wanted: DevicePlugins) -> Commands:
    """Write the node's hardware to a file on the control host."""
    hardware = here()
    if hardware is None:
        yield refuse(UNKNOWN)
        return
    renamed = host.get_fact(network_plugins.Displaced) if wanted.network_plugins.multus else []
    if renamed and host.state.is_executing:
        warn(
            host,
            f"{DEVICE_PLUGINS.name}.network_plugins: Cilium has renamed Multus' configuration to {renamed[0]}, so pods get no "
            "networks: let its cni.exclusive be false, and restart the DaemonSet multus",
        )
    settings = NCCL.here()
    try:
        text = nccl.text(settings, hardware) if settings else ""
    except ValueError as error:
        yield refuse(f"nccl.{error}")
        return
    discovered = discover(hardware, node_spec.read(), published(LABELS_KEY.here(), hardware), text)
    path = _nodes(wanted) / f"{host.name.replace('/', '_')}.json"
    document = to_text(discovered)
    if host.state.is_executing:
        _unwritten.setdefault(host.state, {}).setdefault(_folder(wanted.folder), set()).add(host.name)
    if _differs(path, document):
        yield FileChanges({path: document}).command()
    else:
        host.noop("the node's hardware has not changed")


def _possible_labels(folder: Path, nodes: Nodes) -> list[dict[str, str]]:
    """The labels that hosts of this folder may publish that were not deployed to yet, one entry for each host."""
    possible = []
    for other in host.state.inventory:
        data: dict[str, object] = other.data.dict()  # type: ignore[no-untyped-call]
        if other.name not in nodes and _is_of(data, folder):
            try:
                possible.append(possible_labels(LABELS_KEY.read(data, other.name)))
            except DeployError as error:
                # A host outside --limit: its own deploy refuses this. An operation is also run for the list of changes.
                if host.state.is_executing:
                    warn(host, f"{error}; until then the manifests are made without the labels of this host")
    return possible


@operation()
def write(wanted: DevicePlugins) -> Commands:
    """Render from the files of all hosts in the inventory, and write what differs. One host of the folder does so."""
    folder = _folder(wanted.folder)
    if not _writes(folder):
        host.noop(f"another host writes the manifests in {folder}")
        return
    # All hosts with this folder count, even those outside --limit. Files of other hosts, which had it before, are removed.
    known = {
        other.name.replace("/", "_"): other.name
        for other in host.state.inventory
        if _is_of(other.data.dict(), folder)  # type: ignore[no-untyped-call]
    }
    paths = {path.stem: path for path in sorted(_nodes(wanted).glob("*.json"))}
    old = [path for stem, path in paths.items() if stem not in known]
    try:
        nodes = read_nodes({known[stem]: path for stem, path in paths.items() if stem in known})
        texts = manifests(wanted, nodes, _possible_labels(folder, nodes))
    except ValueError as error:
        yield refuse("\n".join(f"{DEVICE_PLUGINS.name}: {line}" for line in str(error).splitlines()))
        return
    rendered = {folder / name: text for name, text in texts.items()}
    stale = [path for path in (folder / name for name in sorted(OURS)) if path not in rendered and path.is_file()]
    files = FileChanges({path: text for path, text in rendered.items() if _differs(path, text)}, [*old, *stale])
    if files.write or files.remove:
        yield files.command()
    else:
        host.noop(f"the manifests in {folder} are up to date")


OURS = frozenset(
    {
        *(f"{name}.yaml" for name in DAEMON_SETS.values()),
        *("networks.yaml", "device-classes.yaml", "nccl.yaml", "kustomization.yaml"),
        *(f"{name}-pods.yaml" for name in test_pods.NAMES),
        *(f"{network_plugins.FOLDER}/{name}.yaml" for name in (*network_plugins.NAMES, "kustomization")),
    }
)
"""The paths of all rendered files. Other files in the folder are the operator's and are left alone."""
