import re
from typing import Any

import pytest

from tasks.common.archive import ROOT
from tasks.drivers import gpu_driver
from tasks.packages import Distribution, OperatingSystem, dnf_install
from tasks.packages.dkms import ModuleState
from tasks.packages.holds import LOCK_PLUGIN
from tests.deploy.conftest import DEBIAN, ROCKY_9, Answers, Node, of
from tests.deploy.drivers.gpu_node import (
    ABSENT,
    BUILDS,
    KERNEL,
    NO_NOUVEAU,
    PINS,
    PREFIX,
    RUNNING,
    SMI,
    SOURCE,
    STATE,
    VERSION,
    debs,
    deploy,
    due,
    fresh,
    modules,
    there,
    wants,
)
from tests.deploy.systems import UBUNTU, release


def test_the_deploy_installs_kernel_ofed_driver_and_engine_in_this_order() -> None:
    calls = re.findall(r"^(\w+)\.(?:install|configure|pin)\(", (ROOT / "deploy.py").read_text(), re.MULTILINE)
    # The driver is built for a kernel, nvidia_peermem against OFED; the runtime is for an engine that is there.
    wanted = ["kernel", "ofed", "gpu_driver", "peer_memory", "container_engine", "container_runtime"]
    assert [name for name in calls if name in wanted] == wanted


def test_nothing_is_done_if_all_is_in_place(node: Node) -> None:
    result = deploy(node, there())
    assert list(result.planned) == [
        f"{PREFIX}{name}"
        for name in (
            "No driver in use replaced",
            "The kernel's own drivers not loaded",
            "nvidia-driver: key of its repository",
            "nvidia-driver: repository",
            "Version",
            "Packages",
            "Modules for the running kernel",
            "Loaded modules",
            "Persistence mode",
            "Persistence daemon",
            "nvidia-smi",
        )
    ]
    assert result.did_nothing


def test_a_fresh_debian_gets_repository_and_packages(node: Node) -> None:
    before = fresh(DEBIAN)
    packed = {BUILDS: f"nvidia/{VERSION}: added", "licence=$(modinfo": ["installed", "driver Dual MIT/GPL"]}
    runs = {STATE: [RUNNING.replace("enabled", "disabled")], SMI: [f"version {VERSION}"]}
    result = deploy(node, before, {**before, **modules(ABSENT), **packed, **runs}, fabric_manager=True)
    assert result.uploads[gpu_driver.BLACKLIST].decode() == NO_NOUVEAU
    assert result.uploads[gpu_driver.PREFERENCES].decode() == PINS
    assert result.uploads["/etc/apt/sources.list.d/trackbed-nvidia-driver.sources"].decode() == SOURCE
    assert not result.failed
    [apt] = result.commands[f"{PREFIX}Packages"]
    names = ("nvidia-open", "nvidia-persistenced", "nvidia-fabricmanager")
    assert apt.endswith(" ".join(["", *(f"'{name}={VERSION}-*'" for name in names)]))
    [built] = result.commands[f"{PREFIX}Modules for the running kernel"]
    assert built.endswith(f" sh nvidia {VERSION} {KERNEL}")
    [loaded] = result.commands[f"{PREFIX}Loaded modules"]
    assert "modprobe nvidia ||" in loaded
    assert " sh no " in loaded
    order = list(result.commands)
    assert order.index(f"{PREFIX}Fabric manager") < order.index(f"{PREFIX}Persistence daemon")
    assert " sh nvidia-fabricmanager.service " in result.commands[f"{PREFIX}Fabric manager"][0]


def test_a_fresh_rocky_gets_repository_and_packages(node: Node) -> None:
    result = deploy(node, fresh(ROCKY_9), open=False)
    source = result.uploads["/etc/yum.repos.d/trackbed-nvidia-driver.repo"].decode()
    assert "baseurl=https://developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64\n" in source
    # cuda-drivers depends on packages of its version or a newer one, so the locks come first, and dnf respects them.
    plugin, lock = result.commands[f"{PREFIX}Version"]
    assert plugin == str(dnf_install(LOCK_PLUGIN))
    assert f" '*nvidia*{VERSION}*' 'gpu_driver: the repository must have version {VERSION} " in lock
    [dnf] = result.commands[f"{PREFIX}Packages"]
    assert dnf.endswith(f" '' 'cuda-drivers-{VERSION}-*' 'nvidia-persistenced-{VERSION}-*'")
    order = list(result.commands)
    assert order.index(f"{PREFIX}Version") < order.index(f"{PREFIX}Packages")
    assert gpu_driver.PREFERENCES not in result.uploads


def system(identity: str, version: str) -> OperatingSystem:
    family: Any = "rhel" if identity == "rocky" else "debian"
    return OperatingSystem(Distribution(identity.title(), family, 1, 1), identity, version)


@pytest.mark.parametrize(
    ("identity", "version", "data", "names"),
    [
        ("debian", "12", {"open": False}, ("cuda-drivers", "nvidia-persistenced")),
        ("debian", "12", {"persistence": False}, ("nvidia-open",)),
        ("ubuntu", "24.04", {"fabric_manager": True}, ("nvidia-open", "nvidia-fabricmanager")),
        ("ubuntu", "24.04", {"version": "570.86.15", "fabric_manager": True}, ("nvidia-open", "nvidia-fabricmanager-570")),
        ("ubuntu", "24.04", {"version": "590.48.01"}, ("nvidia-open", "nvidia-persistenced")),
        ("ubuntu", "24.04", {"version": "590.48.01", "persistence": False}, ("nvidia-open",)),
        ("rocky", "9", {"version": "570.86.15", "fabric_manager": True, "persistence": False},
         ("nvidia-open", "nvidia-fabric-manager")),
        ("ubuntu", "22.04", {"source": "distribution"}, ("nvidia-headless-580-server-open", "nvidia-utils-580-server")),
        ("ubuntu", "22.04", {"source": "distribution", "open": False, "fabric_manager": True},
         ("nvidia-headless-580-server", "nvidia-utils-580-server", "nvidia-fabricmanager-580")),
    ],
)  # fmt: skip
def test_each_distribution_has_its_packages(
    identity: str, version: str, data: dict[str, Any], names: tuple[str, ...]
) -> None:
    wanted = gpu_driver.GpuDriver(**{"version": VERSION, **data})
    assert gpu_driver.package_names(wanted, system(identity, version)) == names


@pytest.mark.parametrize(
    ("identity", "version", "architecture", "folder", "key"),
    [
        ("debian", "13", "x86_64", "debian13/x86_64/", "8793F200"),
        ("ubuntu", "24.04", "aarch64", "ubuntu2404/sbsa/", "3bf863cc"),
        pytest.param("ubuntu", "26.04", "x86_64", "ubuntu2604/x86_64/", "60DF8A40", id="gpu-driver-container-758"),
        ("rocky", "8.10", "x86_64", "rhel8/x86_64", "D42D0685"),
    ],
)
def test_each_distribution_has_its_repository_and_key(
    identity: str, version: str, architecture: str, folder: str, key: str
) -> None:
    made = gpu_driver.cuda_repository(system(identity, version), architecture)
    assert made.uri.endswith(f"/compute/cuda/repos/{folder}")
    assert made.key == f"{made.uri.rstrip('/')}/{key}.pub"
    # The file is named after the end of the fingerprint.
    assert made.fingerprint.endswith(key.upper())


def test_ubuntu_s_own_packages_need_no_repository(node: Node) -> None:
    result = deploy(node, {**there(), **UBUNTU}, source="distribution")
    assert f"{PREFIX}nvidia-driver: no repository" in result.planned
    [install] = result.commands[f"{PREFIX}Packages"]
    assert install.endswith(f" 'nvidia-headless-580-server-open={VERSION}-*' 'nvidia-utils-580-server={VERSION}-*'")


@pytest.mark.parametrize(
    ("answers", "refused"),
    [
        ({BUILDS: "nvidia-fs/2.20: added"}, f"DKMS has no module nvidia {VERSION}"),
        ({of(ModuleState, "nvidia"): ["path "]}, "the running kernel has no module nvidia; `dkms status`"),
        ({"licence=$(modinfo": ["installed", "driver NVIDIA"]}, "is NVIDIA, which does not fit open True"),
        ({STATE: ["ActiveState=inactive LoadState=not-found "]}, "the node has no nvidia-persistenced.service"),
        ({SMI: ["missing"]}, "the node has no nvidia-smi"),
        ({SMI: ["failed No devices were found"]}, f"version {VERSION}, but says: No devices were found"),
        ({SMI: ["version 570.86.15"]}, "but says: 570.86.15"),
        ({SMI: []}, "but says: nothing"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(node: Node, answers: Answers, refused: str) -> None:
    result = deploy(node, there(), {**there(), **answers})
    assert result.failed
    assert result.flat[-1].startswith("refuse: gpu_driver")
    assert refused in result.flat[-1]


@pytest.mark.parametrize(
    ("answers", "data", "message"),
    [
        (DEBIAN, {"source": "distribution"}, "gpu_driver.source: only Ubuntu's own packages are supported"),
        ({**DEBIAN, "uname -m": "riscv64"}, {}, "gpu_driver.repository: NVIDIA's repository for Debian 12 on riscv64 is not"),
        pytest.param(
            release("rocky", "10.1"), {}, "Rocky Linux 10.1 on x86_64 is not known; look for its folder in https://",
            id="rocky-documentation-2769",
        ),
    ],
)  # fmt: skip
def test_a_system_without_such_packages_is_refused(
    node: Node, answers: Answers, data: dict[str, Any], message: str
) -> None:
    assert message in deploy(node, {"uname -m": "x86_64", **answers}, **data).refusal


UNREGISTERED = "fabric state of 00000000:1B:00.0: In Progress, status: N/A"


@pytest.mark.parametrize(
    ("data", "remedy", "waits"),
    [({"fabric_manager": True}, "journalctl -u nvidia-fabricmanager", True), ({}, "give fabric_manager True", False)],
)
def test_gpus_without_their_fabric_fail_the_host(node: Node, data: dict[str, Any], remedy: str, waits: bool) -> None:
    answers = {**there(**{SMI: [f"version {VERSION}", UNREGISTERED]}), **debs(f"{VERSION}-1", "nvidia-fabricmanager")}
    result = deploy(node, answers, **data)
    assert result.failed
    *wait, refusal = result.commands[f"{PREFIX}nvidia-smi"]
    assert any("left=24" in command for command in wait) == waits
    assert "802" in refusal and "state of 00000000:1B:00.0: In Progress" in refusal and remedy in refusal


@pytest.mark.parametrize(("data", "found", "installed"), [
    ({"fabric_manager": True}, ["0000:05:00.0"], True), ({"fabric_manager": True}, [], False), ({}, ["0000:05:00.0"], False),
])  # fmt: skip
def test_nvswitches_of_nvlink_5_get_their_subnet_manager(
    node: Node, data: dict[str, Any], found: list[str], installed: bool
) -> None:
    answers = {**there(), **debs(f"{VERSION}-1", "nvidia-fabricmanager"), "SW_MNG": found}
    result = deploy(node, answers, **data)
    assert not result.failed
    commands = result.commands.get(f"{PREFIX}NVLink subnet manager", [])
    assert [" nvlsm" in command for command in commands][:1] == [True] * installed
    assert any("modprobe ib_umad" in command for command in commands) == installed
    assert any(content.endswith(b"\nib_umad\n") for content in result.uploads.values()) == installed


@pytest.mark.parametrize(("boot", "waits"), [("1", True), ("0", False)])
def test_nvlink_5_waits_for_the_reboot_that_loads_ofeds_modules(node: Node, boot: str, waits: bool) -> None:
    """OFED's ib_umad may not load beside the kernel's own ib_core. If that failed the host, the reboot would never come."""
    wants(node, fabric_manager=True)
    node.data["reboot"] = {"policy": "allow"}
    off = {STATE: ["ActiveState=inactive LoadState=loaded UnitFileState=disabled "]}
    seen = {"SW_MNG": ["0000:05:00.0"], SMI: [f"version {VERSION}", UNREGISTERED]}
    answers = {**there(**off, **due("ofed", boot=boot), **seen), **debs(f"{VERSION}-1", "nvidia-fabricmanager")}
    result = node.deploy(gpu_driver.install, answers)
    assert result.failed is not waits
    assert any("modprobe ib_umad" in command for command in result.flat) is not waits
    assert (result.commands[f"{PREFIX}Fabric manager"] == []) is waits
    assert any(content.endswith(b"\nib_umad\n") for content in result.uploads.values())
