"""The archive with all files that make a node of the lab a Kubernetes node. It is cached by its content."""

import shutil
from hashlib import sha256
from pathlib import Path

from lab import cache
from lab.cluster import network_plugins, programs
from lab.cluster.images import Image
from lab.command import run
from lab.go import go_programs
from lab.go.go_programs import Build
from lab.lock import exclusive
from lab.progress import step

ROOTFS = Path(__file__).parent / "rootfs"
IMAGES = "var/lib/trackbed-lab/images"
"""The folder on the node with the archives of images."""


DEVICE_PLUGIN = "k8s-rdma-shared-dp:v1.5.3"


def pause() -> Image:
    """The pause image, whose container holds a pod's namespaces."""
    return Image("pause:1", ["/pause"], files={"pause": go_programs.ensure(programs.PAUSE) / "pause"})


def device_plugin() -> Image:
    """The real k8s-rdma-shared-dev-plugin. It ends at once if there is no list of PCI devices."""
    return Image(
        DEVICE_PLUGIN,
        ["/k8s-rdma-shared-dp"],
        files={
            "k8s-rdma-shared-dp": go_programs.ensure(programs.DEVICE_PLUGIN) / "k8s-rdma-shared-dp",
            "usr/share/misc/pci.ids": programs.pci_ids(),
        },
    )


def tools() -> Image:
    """Only links into /usr. A pod mounts the node's /usr there, with its shell, ibv_devinfo and perftest."""
    links = {name: f"usr/{name}" for name in ("bin", "lib", "lib64", "sbin")}
    return Image("tools:1", ["/usr/bin/sh"], links=links, folders=["usr", "etc", "proc", "sys", "dev", "tmp", "run"])


PERFTEST = "perftest:1"
"""The image of pods for tests of RDMA."""


def perftest() -> Image:
    """perftest, ibv_devinfo, and a shell."""
    return Image(
        PERFTEST,
        ["/bin/sh"],
        files={**programs.perftest(), **programs.shell()},
        links=programs.SHELL_LINKS,
        folders=["etc", "proc", "sys", "dev", "tmp", "run"],
    )


def ensure() -> Path:
    """The archive (tar, zstd) to unpack in a node's root folder. It is built first if it is not cached."""
    builds = (
        programs.kubernetes_build("kubelet", programs.kubernetes_version()),
        *programs.ON_THE_NODES,
        *network_plugins.builds(),
    )
    archive = cache.home() / f"cluster-{_key(builds)}.tar.zst"
    if archive.exists():
        return archive
    for build in builds:
        go_programs.ensure(build)
    # Another lab may want the same archive.
    with exclusive(archive.with_name("cluster.lock"), "another command is packing the nodes' archive"):
        if not archive.exists():
            _pack(archive)
    return archive


def _pack(archive: Path) -> None:
    work = archive.with_name("cluster-bundle.new")
    shutil.rmtree(work, ignore_errors=True)
    with step("packing the nodes' archive", usual_s=10):
        shutil.copytree(ROOTFS, work)
        _copy(programs.kubernetes("kubelet"), work / "usr/bin")
        for build in (programs.CONTAINERD, programs.RUNC):
            for program in sorted(build.target.iterdir()):
                _copy(program, work / "usr/local/bin")
        for program in sorted(programs.CNI.target.iterdir()):
            _copy(program, work / "opt/cni/bin")
        (work / IMAGES).mkdir(parents=True)
        for made in (pause(), device_plugin(), tools(), perftest(), *network_plugins.images()):
            made.write(work / IMAGES / f"{made.name.partition(':')[0]}.tar")
        new = archive.with_suffix(".new")
        run(["tar", "-C", work, "--owner=0", "--group=0", "--zstd", "-cf", new, "."])
        new.rename(archive)
    shutil.rmtree(work)


def _key(builds: tuple[Build, ...]) -> str:
    digest = sha256(" ".join(build.target.name for build in builds).encode())
    ours = (Path(__file__).with_name(f"{name}.py") for name in ("bundle", "images", "network_plugins", "programs"))
    for file in (*ours, *sorted(ROOTFS.rglob("*"))):
        if file.is_file():
            digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _copy(program: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, folder)
