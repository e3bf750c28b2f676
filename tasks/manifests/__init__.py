"""Renders the manifests of device plugins on the control host, from the hardware of all nodes, into a folder of the operator's.

Each node's hardware is kept in the folder (`nodes/HOST.json`), so that a deploy with `--limit` renders for all nodes.
"""

from __future__ import annotations

import json
from pathlib import Path
from weakref import WeakKeyDictionary

import cattrs
from attrs import define, field
from pyinfra.api.command import FunctionCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host

from tasks import nccl
from tasks.common.commands import Commands, refuse
from tasks.common.data import Key, record
from tasks.hardware import UNKNOWN, NodeHardware
from tasks.labels import CAPABILITIES, LABELS_KEY
from tasks.manifests.device_plugins import DevicePlugins, Discovered, discover, manifests
from tasks.nccl import NCCL

DEVICE_PLUGINS = Key[DevicePlugins | None]("device_plugins", None, record(DevicePlugins))
KEYS = (DEVICE_PLUGINS,)


@deploy("Manifests")
def render() -> None:
    """Render the manifests; without the key `device_plugins`, do nothing.

    :raises DeployError: hosts with the same folder have different values of the key, or a value contradicts the labels.
    """
    wanted = DEVICE_PLUGINS.here()
    if wanted is None:
        return
    _check_same_for_all(wanted)
    _check_labels(wanted)
    collect(name="Hardware of the node", wanted=wanted)
    write(name="Write", wanted=wanted, _run_once=True)


# By deploy and folder: the first host with that folder, and its value. Every other host is compared with it only.
_first: WeakKeyDictionary[State, dict[str, tuple[str, DevicePlugins]]] = WeakKeyDictionary()


def _check_same_for_all(wanted: DevicePlugins) -> None:
    other, others_value = _first.setdefault(host.state, {}).setdefault(wanted.folder, (host.name, wanted))
    if others_value != wanted:
        raise DeployError(
            f"{host.name}.{DEVICE_PLUGINS.name}: {other} has another value for the same folder {wanted.folder}, where one "
            "set of manifests is made for both; give one value (group_data/all.py), or another folder"
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


def _nodes(wanted: DevicePlugins) -> Path:
    return Path(wanted.folder).expanduser() / "nodes"


@define
class Files:
    """Files on the control host to write, and files to remove."""

    write: dict[Path, str] = field(factory=dict)
    remove: list[Path] = field(factory=list)

    def command(self) -> FunctionCommand:
        """Make a command that writes and removes them."""
        return FunctionCommand(_put, (self,), {})


# pyinfra calls a function that has parameters `state` and `host` directly.
def _put(state: State, host: Host, files: Files) -> None:
    for path, text in files.write.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(text)
        new.replace(path)
    for path in files.remove:
        path.unlink(missing_ok=True)


def _differs(path: Path, text: str) -> bool:
    return not path.is_file() or path.read_text() != text


@operation()
def collect(wanted: DevicePlugins) -> Commands:
    """Write the node's hardware to a file on the control host."""
    hardware = host.get_fact(NodeHardware)
    if hardware is None:
        yield refuse(UNKNOWN)
        return
    settings = NCCL.here()
    try:
        text = nccl.text(settings, hardware) if settings else ""
    except ValueError as error:
        yield refuse(f"nccl.{error}")
        return
    path = _nodes(wanted) / f"{host.name.replace('/', '_')}.json"
    document = json.dumps(cattrs.unstructure(discover(hardware, text)), indent=2) + "\n"
    if _differs(path, document):
        yield Files({path: document}).command()
    else:
        host.noop("the node's hardware has not changed")


@operation()
def write(wanted: DevicePlugins) -> Commands:
    """Render from the files of all hosts in the inventory, and write what differs."""
    # All hosts of the inventory count, even those outside --limit. Files of hosts that have left the inventory are removed.
    known = {other.name.replace("/", "_"): other.name for other in host.state.inventory}
    nodes, old = {}, []
    for path in sorted(_nodes(wanted).glob("*.json")):
        if path.stem in known:
            nodes[known[path.stem]] = cattrs.structure(json.loads(path.read_text()), Discovered)
        else:
            old.append(path)
    folder = Path(wanted.folder).expanduser()
    rendered = {folder / name: text for name, text in manifests(wanted, nodes).items()}
    stale = [path for path in sorted(folder.glob("*.yaml")) if path not in rendered and path.name in OURS]
    files = Files({path: text for path, text in rendered.items() if _differs(path, text)}, [*old, *stale])
    if files.write or files.remove:
        yield files.command()
    else:
        host.noop(f"the manifests in {folder} are up to date")


OURS = frozenset(
    {
        *(
            "rdma-shared-device-plugin.yaml",
            "sriov-device-plugin.yaml",
            "erdma-device-plugin.yaml",
            "nvidia-device-plugin.yaml",
        ),
        *("networks.yaml", "nccl.yaml", "kustomization.yaml", "rdma-test-pods.yaml", "erdma-test-pods.yaml"),
    }
)
"""All names of rendered files. Other files in the folder are the operator's and are left alone."""
