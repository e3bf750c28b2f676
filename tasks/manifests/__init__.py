"""Device plugins' manifests, rendered on the control host from what the nodes have, into a folder that the operator names.

Each node's part is kept beside them (`nodes/HOST.json`), so that a deploy of a few hosts (`--limit`) renders for all.
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
    """Render them; nothing without the key `device_plugins`.

    :raises DeployError: hosts of one folder differ in the key, or it does not go with the host's labels.
    """
    wanted = DEVICE_PLUGINS.here()
    if wanted is None:
        return
    _same_for_all(wanted)
    _goes_with_labels(wanted)
    collect(name="What the node has", wanted=wanted)
    write(name="Write", wanted=wanted, _run_once=True)


# By run and folder: the first host that named the folder, and what it wants there. Comparing each with all would be quadratic.
_first: WeakKeyDictionary[State, dict[str, tuple[str, DevicePlugins]]] = WeakKeyDictionary()


def _same_for_all(wanted: DevicePlugins) -> None:
    other, said = _first.setdefault(host.state, {}).setdefault(wanted.folder, (host.name, wanted))
    if said != wanted:
        raise DeployError(
            f"{host.name}.{DEVICE_PLUGINS.name}: {other} says otherwise for the same folder {wanted.folder}, and one "
            "set of manifests is made of both; give it once (group_data/all.py), or another folder"
        )


def _goes_with_labels(wanted: DevicePlugins) -> None:
    labels = LABELS_KEY.here()
    plugins = (("shared_rdma", wanted.shared_rdma, "rdma"), ("erdma", wanted.erdma, "aliyun.accelerator/erdma"))
    for name, plugin, key in plugins:
        if labels is None or plugin is None or key not in labels.capabilities:
            continue
        said = labels.resource(CAPABILITIES[key])
        if said != plugin.resource:
            raise DeployError(
                f"{host.name}.{DEVICE_PLUGINS.name}.{name}: the plugin makes {plugin.resource}, and labels.resources says that "
                f"{key!r} selects {said}; give labels.resources {{{key!r}: {plugin.resource!r}}}"
            )


def _nodes(wanted: DevicePlugins) -> Path:
    return Path(wanted.folder).expanduser() / "nodes"


@define
class Files:
    """Files of this machine to write, and some to remove."""

    write: dict[Path, str] = field(factory=dict)
    remove: list[Path] = field(factory=list)

    def command(self) -> FunctionCommand:
        """Do it, when its turn comes."""
        return FunctionCommand(_put, (self,), {})


# pyinfra calls a function with these two names in place.
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
    """Keep the node's part on this machine."""
    found = host.get_fact(NodeHardware)
    if found is None:
        yield refuse(UNKNOWN)
        return
    settings = NCCL.here()
    try:
        text = nccl.text(settings, found) if settings else ""
    except ValueError as error:
        yield refuse(f"nccl.{error}")
        return
    path = _nodes(wanted) / f"{host.name.replace('/', '_')}.json"
    part = json.dumps(cattrs.unstructure(discover(found, text)), indent=2) + "\n"
    if _differs(path, part):
        yield Files({path: part}).command()
    else:
        host.noop("the node has what it had")


@operation()
def write(wanted: DevicePlugins) -> Commands:
    """Render from the parts of all hosts of the inventory, and write what differs."""
    # The inventory's, whether they take part in this deploy or not; a host that was taken out of it counts no more.
    known = {other.name.replace("/", "_"): other.name for other in host.state.inventory}
    parts, old = {}, []
    for path in sorted(_nodes(wanted).glob("*.json")):
        if path.stem in known:
            parts[known[path.stem]] = cattrs.structure(json.loads(path.read_text()), Discovered)
        else:
            old.append(path)
    folder = Path(wanted.folder).expanduser()
    made = {folder / name: text for name, text in manifests(wanted, parts).items()}
    stale = [path for path in sorted(folder.glob("*.yaml")) if path not in made and path.name in OURS]
    files = Files({path: text for path, text in made.items() if _differs(path, text)}, [*old, *stale])
    if files.write or files.remove:
        yield files.command()
    else:
        host.noop(f"the manifests in {folder} are as they should be")


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
"""The names of the files that may be rendered; others in the folder are the operator's."""
