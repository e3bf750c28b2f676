"""Images of the plugins that pods' networks need (`device_plugins.network_plugins`), built from the Go module proxy."""

from collections.abc import Callable

from lab.cluster import programs
from lab.cluster.images import REGISTRY, Image
from lab.errors import LabError
from lab.go import go_programs
from lab.go.go_programs import Build
from lab.progress import say

BUILDS: dict[str, Build] = {
    "multus": programs.MULTUS,
    "whereabouts": programs.WHEREABOUTS,
    "sriov_cni": programs.SRIOV_CNI,
    "rdma_cni": programs.RDMA_CNI,
}
"""By the plugin's key in the inventory."""

SRIOV_DEVICE_PLUGIN = f"{REGISTRY}/{programs.SRIOV_PLUGIN.name.replace('-v', ':v')}"
"""The image of sriov-network-device-plugin, which gives pods the VFs of their networks."""

# Its own image translates the options of its entrypoint for the program.
_SRIOV_ENTRYPOINT = """for word; do case $word in --resource-prefix=*) prefix=$word; esac; done
exec /usr/bin/sriovdp --logtostderr -v 10 "$prefix"
"""


def reference(name: str) -> str:
    """The name of a plugin's image in the inventory."""
    return f"{REGISTRY}/{BUILDS[name].name.replace('-v', ':v')}"


def build() -> None:
    """Build the plugins that are not built yet. Say which cannot be built: a module proxy may lack a module."""
    for name, each in {**BUILDS, programs.SRIOV_PLUGIN.name: programs.SRIOV_PLUGIN}.items():
        try:
            go_programs.ensure(each)
        except LabError as error:
            say(f"without {name}: {each.name} cannot be built here: {error.what}")


def built() -> tuple[str, ...]:
    """The plugins that are built."""
    return tuple(name for name, each in BUILDS.items() if each.target.exists())


def has_sriov_device_plugin() -> bool:
    """Whether sriov-network-device-plugin is built."""
    return programs.SRIOV_PLUGIN.target.exists()


def builds() -> list[Build]:
    """The programs that are built: those of the plugins, and sriov-network-device-plugin."""
    return [each for each in (*BUILDS.values(), programs.SRIOV_PLUGIN) if each.target.exists()]


def images() -> list[Image]:
    """The images of the built plugins. The manifests use them like the projects' own images."""
    return [*(_IMAGES[name]() for name in built()), *([_sriov_device_plugin()] if has_sriov_device_plugin() else [])]


def _name(name: str) -> str:
    return reference(name).removeprefix(f"{REGISTRY}/")


def _multus() -> Image:
    folder = programs.MULTUS.target
    # It installs the program from the place that it has in the project's image.
    files = {
        "thin_entrypoint": folder / "thin_entrypoint",
        "usr/src/multus-cni/bin/multus": folder / "multus",
    }
    return Image(_name("multus"), ["/thin_entrypoint"], files=files)


def _whereabouts() -> Image:
    folder = programs.WHEREABOUTS.target
    scripts = go_programs.source(programs.WHEREABOUTS_MODULE, programs.WHEREABOUTS) / "script"
    files = {
        # The packages' own names are cmd, controlloop and reconciler.
        "whereabouts": folder / "cmd",
        "ip-control-loop": folder / "controlloop",
        "ip-reconciler": folder / "reconciler",
        **{name: scripts / name for name in ("install-cni.sh", "lib.sh", "token-watcher.sh")},
        **programs.shell(),
    }
    return Image(_name("whereabouts"), ["/install-cni.sh"], files=files, links=programs.SHELL_LINKS)


def _sriov_device_plugin() -> Image:
    files = {
        "usr/bin/sriovdp": programs.SRIOV_PLUGIN.target / "sriovdp",
        "usr/share/misc/pci.ids": programs.pci_ids(),
        **programs.shell(),
    }
    entrypoint = ["/bin/sh", "-c", _SRIOV_ENTRYPOINT, "sriovdp"]
    name = SRIOV_DEVICE_PLUGIN.removeprefix(f"{REGISTRY}/")
    return Image(name, entrypoint, files=files, links=programs.SHELL_LINKS, folders=["tmp"])


def _copied(name: str, program: str) -> Callable[[], Image]:
    """An image that copies one program to the node, and waits."""

    def image() -> Image:
        script = f"cp -f /usr/bin/{program} /host/opt/cni/bin/ && exec sleep 2147483647"
        files = {f"usr/bin/{program}": BUILDS[name].target / program, **programs.shell()}
        return Image(_name(name), ["/bin/sh", "-c", script], files=files, links=programs.SHELL_LINKS)

    return image


_IMAGES: dict[str, Callable[[], Image]] = {
    "multus": _multus,
    "whereabouts": _whereabouts,
    "sriov_cni": _copied("sriov_cni", "sriov"),
    "rdma_cni": _copied("rdma_cni", "rdma"),
}
