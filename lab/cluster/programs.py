"""The programs of the cluster. All are built here; none comes from a registry."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from lab import apt, cache
from lab.command import run
from lab.errors import LabError
from lab.go import go_programs
from lab.go.go_programs import Build
from lab.progress import step

HERE = Path(__file__).parent / "go"


def _required(module: str, folder: Path) -> str:
    """The version of a module in one of our go.mod files, which is the only place that says it."""
    match = re.search(rf"\b{re.escape(module)} (v\S+)", (folder / "go.mod").read_text())
    if match is None:
        raise LabError(f"{folder}/go.mod requires no {module}")
    return match[1]


KUBERNETES_VERSION = _required("k8s.io/kubernetes", HERE / "kubernetes")
_RELEASE = re.compile(r"v1\.(\d+)\.(\d+)")


def _flags(version: str) -> str:
    """Without these flags the API server would report v0.0.0, which clients compare with their own version."""
    major, minor, _ = version.lstrip("v").split(".")
    return " ".join(
        f"-X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    )


KUBERNETES = Build(
    name=f"kubernetes-{KUBERNETES_VERSION}",
    folder=HERE / "kubernetes",
    packages=tuple(
        f"k8s.io/kubernetes/cmd/{name}"
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubeadm", "kubectl", "kubelet")
    ),
    ldflags=_flags(KUBERNETES_VERSION),
    usual_s=230,
    memory_mib=3072,
    disk_mib=6144,
)
OTHERS = {
    "kubernetes": ("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    "kubelet": ("kubelet",),
}
"""The programs that can have another version than that of go.mod: what is built together, by its name. kubectl stays."""
CONTAINERD = Build(
    name="containerd-v2.2.9",
    packages=tuple(
        f"github.com/containerd/containerd/v2/cmd/{name}@v2.2.9"
        for name in ("containerd", "containerd-shim-runc-v2", "ctr")
    ),
    ldflags="-X github.com/containerd/containerd/v2/version.Version=v2.2.9",
    usual_s=60,
    memory_mib=1024,
    disk_mib=2048,
)
# runc's first steps in a new namespace are in C. Every pod's sandbox has a seccomp profile, which runc without seccomp refuses.
RUNC = Build(
    name="runc-v1.3.5",
    packages=("github.com/opencontainers/runc@v1.3.5",),
    ldflags="-X main.version=1.3.5",
    cgo=True,
    tags="seccomp",
    host_packages=("libc6-dev", "libseccomp-dev", "pkg-config"),
    usual_s=20,
)
CNI = Build(
    name="cni-plugins-v1.9.1",
    packages=tuple(
        f"github.com/containernetworking/plugins/plugins/{name}@v1.9.1"
        for name in (
            *("main/bridge", "main/host-device", "main/loopback", "main/macvlan"),
            *("ipam/host-local", "ipam/static"),
        )
    ),
    usual_s=20,
)
DEVICE_PLUGIN = Build(
    name="k8s-rdma-shared-dp-v1.5.3",
    folder=HERE / "rdma-shared-dp",
    packages=("github.com/Mellanox/k8s-rdma-shared-dev-plugin/cmd/k8s-rdma-shared-dp",),
    usual_s=20,
)
SRIOV_PLUGIN = Build(
    name="sriov-network-device-plugin-v3.9.0",
    folder=HERE / "sriov-dp",
    packages=("github.com/k8snetworkplumbingwg/sriov-network-device-plugin/cmd/sriovdp",),
    usual_s=60,
)
# `go install` of a path with a version asks for the list of the module's versions, which not every proxy serves. A build by a
# go.mod of ours does not ask.
MULTUS = Build(
    name="multus-v4.3.0",
    folder=HERE / "multus",
    packages=tuple(f"gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/{name}" for name in ("multus", "thin_entrypoint")),
    usual_s=90,
)
WHEREABOUTS_MODULE = "github.com/k8snetworkplumbingwg/whereabouts"
WHEREABOUTS = Build(
    name="whereabouts-v0.9.4",
    folder=HERE / "whereabouts",
    packages=tuple(f"{WHEREABOUTS_MODULE}/{name}" for name in ("cmd", "cmd/controlloop", "cmd/reconciler")),
    usual_s=90,
)
SRIOV_CNI = Build(
    name="sriov-cni-v2.10.0",
    folder=HERE / "sriov-cni",
    packages=("github.com/k8snetworkplumbingwg/sriov-cni/cmd/sriov",),
    usual_s=20,
)
RDMA_CNI = Build(
    name="rdma-cni-v1.6.0",
    folder=HERE / "rdma-cni",
    packages=("github.com/k8snetworkplumbingwg/rdma-cni/cmd/rdma",),
    usual_s=20,
)
READINESS_CONTROLLER_MODULE = "sigs.k8s.io/node-readiness-controller"
READINESS_CONTROLLER = Build(
    name="node-readiness-controller-v0.5.0",
    folder=HERE / "node-readiness-controller",
    packages=(f"{READINESS_CONTROLLER_MODULE}/cmd",),
    usual_s=60,
)
PAUSE = Build(name="pause", folder=HERE / "pause", packages=(".",), usual_s=10)

ON_THE_NODES = (CONTAINERD, RUNC, CNI, DEVICE_PLUGIN, PAUSE)


def kubernetes_version() -> str:
    """The version of the control plane and of the kubelets: that of go.mod, or of TRACKBED_TEST_KUBERNETES (as v1.37.2).

    :raises LabError: the variable has no version of Kubernetes 1.
    """
    version = os.environ.get("TRACKBED_TEST_KUBERNETES") or KUBERNETES_VERSION
    if not _RELEASE.fullmatch(version):
        raise LabError(f"TRACKBED_TEST_KUBERNETES={version!r} is no version", "Give it as v1.37.2, or leave it out.")
    return version


def kubernetes(name: str, version: str | None = None) -> Path:
    """One of Kubernetes' programs, of a version or of :func:`kubernetes_version`. It is built first if it is not cached."""
    return go_programs.ensure(kubernetes_build(name, version or kubernetes_version())) / name


def kubernetes_build(name: str, version: str) -> Build:
    """What one of Kubernetes' programs is built with."""
    groups = [group for group, names in OTHERS.items() if name in names]
    return _other(groups[0], version) if groups and version != KUBERNETES_VERSION else KUBERNETES


def _other(group: str, version: str) -> Build:
    """Programs of another version, from a module in the cache. Its checksums are those of Go's public database."""
    folder = cache.home() / "go-modules" / f"{group}-{version}"
    if not (folder / "go.sum").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "go.mod").write_text(_module(version))
        (folder / "tools.go").write_text(
            "//go:build tools\n\npackage kubernetes\n\nimport (\n"
            + "".join(f'\t_ "k8s.io/kubernetes/cmd/{name}"\n' for name in OTHERS[group])
            + ")\n"
        )
        with step(f"Go: modules of Kubernetes {version}", usual_s=60):
            run([go_programs.go(), "mod", "tidy", "-C", folder], env={**os.environ, "GOTOOLCHAIN": "auto"})
    return Build(
        name=f"{group}-{version}",
        folder=folder,
        packages=tuple(f"k8s.io/kubernetes/cmd/{name}" for name in OTHERS[group]),
        ldflags=_flags(version),
        usual_s=200,
        memory_mib=3072,
        disk_mib=6144,
    )


def _module(version: str) -> str:
    """The go.mod of another version. Kubernetes' own modules have version 0.34.2 where Kubernetes has 1.34.2."""
    ours = (HERE / "kubernetes" / "go.mod").read_text()
    parts = re.findall(r"(k8s\.io/\S+) => ", ours)
    number = f"v0.{version.removeprefix('v1.')}"
    replaced = "".join(f"\t{part} => {part} {number}\n" for part in parts)
    go_line = re.search(r"^go .*$", ours, re.MULTILINE)
    return (
        f"module trackbed.internal/lab/kubernetes\n\n{go_line[0] if go_line else ''}\n\n"
        f"require k8s.io/kubernetes {version}\n\nreplace (\n{replaced})\n"
    )


def etcd() -> Path:
    """Debian's etcd, taken out of its package. If the package were installed, etcd would run as a service of this host."""
    return unpacked("etcd-server") / "usr/bin/etcd"


def pci_ids() -> Path:
    """The list of PCI vendors and devices without which the device plugin does not start."""
    return unpacked("pci.ids") / "usr/share/misc/pci.ids"


SHELL = "bin/busybox"
SHELL_LINKS = {
    f"bin/{name}": "busybox" for name in ("awk", "base64", "cat", "chmod", "cp", "cut", "date", "md5sum")
} | {f"bin/{name}": "busybox" for name in ("mkdir", "nc", "sed", "sh", "sleep", "touch", "tr")}
"""The programs of the shell's package that images use, as links to it."""


def shell() -> dict[str, Path]:
    """A shell and its programs for an image, in one file that needs no library."""
    return {SHELL: unpacked("busybox-static") / SHELL}


PERFTEST = (
    *(
        "perftest",
        "ibverbs-utils",
        "libibverbs1",
        "ibverbs-providers",
        "librdmacm1",
        "libibumad3",
        "libnl-3-200",
        "libnl-route-3-200",
    ),
    *("libpci3", "libudev1", "zlib1g", "libc6"),
)
"""Debian's packages with perftest and ibv_devinfo, and all that they load."""


def perftest() -> dict[str, Path]:
    """The files of an image with perftest."""
    folder = unpacked(*PERFTEST)
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {where: path for where, path in paths.items() if "share/" not in where}


def unpacked(package: str, *more: str) -> Path:
    """The content of a Debian package of the host's own mirror, with that of ``more`` packages, kept in the cache."""
    return _unpacked("+".join((package, *more)), package, lambda _: [package, *more])


def runnable(package: str) -> Path:
    """The content of a package and of its dependencies that this host lacks. Its programs need :func:`found_in`."""
    return _unpacked(f"{package}+needed", package, lambda ours: ours.lacking(package))


def found_in(folder: Path) -> dict[str, str]:
    """Environment variables with which the programs of :func:`runnable` find their libraries."""
    libraries = sorted({str(path.parent) for path in folder.rglob("*.so*")})
    return {"LD_LIBRARY_PATH": ":".join(libraries)}


def _unpacked(name: str, package: str, packages: Callable[[apt.Apt], list[str]]) -> Path:
    def fetch(folder: Path) -> None:
        with step(f"fetching Debian's {package}", usual_s=15), apt.throwaway(apt.host_sources()) as ours:
            # apt always downloads into the working directory.
            run(["env", "-C", folder, "apt-get", *ours.options(), "-q", "download", *packages(ours)])
            for deb in sorted(folder.glob("*.deb")):
                run(["dpkg-deb", "-x", deb, folder])
                deb.unlink()

    return cache.made(cache.home() / "debian" / name, fetch, "packages of Debian")
