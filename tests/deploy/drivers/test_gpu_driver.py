from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from attrs import fields
from pyinfra.api.exceptions import DeployError

from tasks.common.archive import ROOT
from tasks.drivers import gpu_driver
from tasks.drivers.gpu_driver import services
from tasks.packages import Distribution, OperatingSystem
from tests.deploy.conftest import DEBIAN, ROCKY_9, Answers, Node, file_answers, files
from tests.deploy.test_scripts import sh

VERSION = "580.95.05"
KERNEL = "6.1.0-9-amd64"
BOOT = "00000000-0000-4000-8000-00000000000"
PREFIX = "GPU driver | "
USERS, SMI, STATE, REQUESTS = "nvidia-persiste |", "--query-gpu", "UnitFileState", "for task in *"
BUILDS, DPKG = "dkms status", "dpkg -l"
RUNNING = "ActiveState=active LoadState=loaded UnitFileState=enabled "
UBUNTU = {"*-release": ["/etc/os-release", "ID=ubuntu", "NAME=Ubuntu", 'VERSION_ID="22.04"', "---"]}
HEADER = "# Written by Trackbed; changes here are overwritten.\n"
SOURCE = f"""\
{HEADER}Types: deb
URIs: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/
Suites: /
Signed-By: /etc/apt/keyrings/trackbed-nvidia-driver.gpg
"""
PINS = (
    f"{HEADER}Package: *nvidia* *cuda-drivers* libcuda* libnv* libxnvctrl* xserver-xorg-video-nvidia*\n"
    f"Pin: version {VERSION}-*\nPin-Priority: 1001\n"
)
NO_NOUVEAU = f"{HEADER}blacklist nouveau\noptions nouveau modeset=0\n"
LOADED = ["path /lib/modules/K/updates/dkms/nvidia.ko", "installed AB", "users 0", "loaded AB"]
STALE = [*LOADED[:3], "loaded CD"]
IN_MEMORY = "/sys/module/nvidia/version"
ABSENT = LOADED[:2]


def wants(node: Node, **data: Any) -> None:
    node.data = {"gpu_driver": {"version": VERSION, **data}}


def debs(version: str = f"{VERSION}-1", *more: str) -> Answers:
    names = ("nvidia-open", "nvidia-persistenced", *more)
    return {DPKG: ["ii  gpg  2  amd64  x", *(f"ii  {name}  {version}  amd64  x" for name in names)]}


def modules(nvidia: list[str], nouveau: list[str] | None = None) -> Answers:
    """The answers about both modules: the commands differ only in their argument. (Those about units begin like it.)"""
    return {" sh nvidia": nvidia, " sh nouveau": nouveau or ["path "]}


def there(nvidia: list[str] = LOADED, **more: Any) -> Answers:
    """A node with the driver, loaded and working."""
    return {
        STATE: [RUNNING],
        IN_MEMORY: VERSION,
        "licence=$(modinfo": ["installed", "driver Dual MIT/GPL"],
        **modules(nvidia),
        **DEBIAN,
        "uname -m": "x86_64",
        "uname -r": KERNEL,
        **debs(),
        "--show-keys": "EB693B3035CD5710E231E123A4B469963BF863CC",
        BUILDS: f"nvidia/{VERSION}, {KERNEL}, x86_64: installed",
        USERS: ["end"],
        REQUESTS: [f"{BOOT}1"],
        SMI: [f"version {VERSION}"],
        **file_answers("/etc/apt/sources.list.d/trackbed-nvidia-driver.sources", SOURCE),
        **file_answers(gpu_driver.PREFERENCES, PINS),
        **file_answers(gpu_driver.BLACKLIST, NO_NOUVEAU),
        **more,
    }


def test_without_the_key_nothing_is_done(node: Node) -> None:
    assert node.deploy(gpu_driver.install, {}).planned == {}


def test_each_key_is_documented() -> None:
    page = (ROOT / "docs/inventory/drivers.md").read_text()
    assert [each.name for each in fields(gpu_driver.GpuDriver) if f"| `gpu_driver.{each.name}` |" not in page] == []


def test_the_deploy_installs_kernel_ofed_driver_and_engine_in_this_order() -> None:
    calls = re.findall(r"^(\w+)\.(?:install|configure|pin)\(", (ROOT / "deploy.py").read_text(), re.MULTILINE)
    # The driver is built for a kernel, nvidia_peermem against OFED; the runtime is for an engine that is there.
    wanted = ["kernel", "ofed", "gpu_driver", "peer_memory", "container_engine", "container_runtime"]
    assert [name for name in calls if name in wanted] == wanted


def test_nothing_is_done_if_all_is_in_place(node: Node) -> None:
    wants(node)
    result = node.deploy(gpu_driver.install, there())
    assert list(result.planned) == [
        f"{PREFIX}{name}"
        for name in (
            "No driver in use replaced",
            "nouveau not loaded",
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
    assert not any(result.planned.values())
    assert result.flat == []
    assert not result.failed


def fresh(distribution: Answers) -> Answers:
    """A node with nothing of it."""
    answers = {"uname -m": "x86_64", "uname -r": KERNEL, USERS: ["end"], REQUESTS: [f"{BOOT}1"]}
    # The commands that ask the repositories end like those about a module.
    repositories: Answers = {"madison": [], "repoquery": []}
    return {STATE: ["LoadState=not-found"], **repositories, **distribution, **answers, **modules(["path "])}


def test_a_fresh_debian_gets_repository_and_packages(node: Node) -> None:
    wants(node, fabric_manager=True)
    before = fresh(DEBIAN)
    after = {
        **before,
        **modules(ABSENT),
        "licence=$(modinfo": ["installed", "driver Dual MIT/GPL"],
        BUILDS: f"nvidia/{VERSION}: added",
        STATE: [RUNNING.replace("enabled", "disabled")],
        SMI: [f"version {VERSION}"],
    }
    result = node.deploy(gpu_driver.install, before, after)
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
    wants(node, open=False)
    result = node.deploy(gpu_driver.install, fresh(ROCKY_9))
    source = result.uploads["/etc/yum.repos.d/trackbed-nvidia-driver.repo"].decode()
    assert "baseurl=https://developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64\n" in source
    # cuda-drivers depends on packages of its version or a newer one, so the locks come first, and dnf respects them.
    plugin, lock = result.commands[f"{PREFIX}Version"]
    assert plugin.startswith("dnf install -y python3-dnf-plugin")
    assert f" '*nvidia*{VERSION}*' 'gpu_driver: the repository must have version {VERSION} " in lock
    [dnf] = result.commands[f"{PREFIX}Packages"]
    assert dnf.endswith(f" '' 'cuda-drivers-{VERSION}-*' 'nvidia-persistenced-{VERSION}-*'")
    order = list(result.commands)
    assert order.index(f"{PREFIX}Version") < order.index(f"{PREFIX}Packages")
    assert gpu_driver.PREFERENCES not in result.uploads


@pytest.mark.parametrize(
    ("given", "text", "streams"),
    [
        (True, "", "580-open open-dkms"),
        (False, "", "580-dkms latest-dkms"),
        (False, "[nvidia-driver]\nname=nvidia-driver\nstream=570-dkms\nstate=enabled\n", "580-dkms latest-dkms"),
        (True, "[nvidia-driver]\nstream = 580-open\nprofiles =\nstate = enabled\n", None),
        (True, "[nvidia-driver]\nstream=580-open\nstate=disabled\n", "580-open open-dkms"),
    ],
)
def test_dnfs_module_stream_of_the_driver_is_enabled_before_its_packages_are_locked(
    node: Node, given: bool, text: str, streams: str | None
) -> None:
    wants(node, open=given)
    result = node.deploy(gpu_driver.install, {**fresh(ROCKY_9), **files(**{gpu_driver.MODULE_FILE: text})})
    enabled = result.commands[f"{PREFIX}Module stream"]
    assert [each.rpartition(" sh ")[2] for each in enabled] == ([streams] if streams else [])
    order = list(result.commands)
    assert order.index(f"{PREFIX}Module stream") < order.index(f"{PREFIX}Version")
    # The packages that are there are enough.
    have = {
        "rpm --queryformat": [
            f"{name} {VERSION}-1.el9" for name in ("nvidia-open", "cuda-drivers", services.PERSISTENCE)
        ]
    }
    result = node.deploy(gpu_driver.install, {**fresh(ROCKY_9), **have})
    assert result.commands[f"{PREFIX}Module stream"] == []


@pytest.mark.parametrize(
    ("there", "ran"),
    [
        (["580-open", "open-dkms"], ["module reset nvidia-driver", "module enable nvidia-driver:580-open"]),
        (["open-dkms"], ["module reset nvidia-driver", "module enable nvidia-driver:open-dkms"]),
        ([], []),
    ],
)
def test_a_repository_may_have_the_stream_of_the_branch_or_another_or_no_modules(
    tmp_path: Path, there: list[str], ran: list[str]
) -> None:
    program, log = tmp_path / "dnf", tmp_path / "log"
    program.write_text(
        "#!/bin/sh\nshift 2\n"
        'if [ "$2" = list ]; then case " $STREAMS " in *" ${3#*:} "*) exit ;; *) exit 1 ;; esac; fi\n'
        'echo "$*" >> "$LOG"\n'
    )
    program.chmod(0o755)
    log.touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "STREAMS": " ".join(there)}
    sh(gpu_driver._STREAM, "580-open", "open-dkms", **environment)
    assert log.read_text().splitlines() == ran


# As in Ubuntu's nvidia-compute-utils-580.
COMMAND = "/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode --verbose"
UNIT_FILE = "--property=FragmentPath"
DROP_IN = (
    f"{HEADER}[Service]\nExecStart=\nExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --verbose\n"
)


def test_ubuntus_daemon_makes_the_gpus_persistent(node: Node) -> None:
    wants(node)
    static = {UNIT_FILE: [COMMAND], **there(), STATE: ["ActiveState=active LoadState=loaded UnitFileState=static "]}
    result = node.deploy(gpu_driver.install, static)
    *_, replaced = result.commands[f"{PREFIX}Persistence mode"]
    assert replaced.endswith(f" sh put {services.DROP_IN} -- nvidia-persistenced.service")
    assert "systemctl try-restart" in replaced
    assert DROP_IN.encode() in result.uploads.values()
    # A unit that a rule of udev's starts cannot be enabled.
    assert result.commands[f"{PREFIX}Persistence daemon"] == []
    assert node.deploy(gpu_driver.install, {**static, **files(**{services.DROP_IN: DROP_IN})}).flat == []


def test_a_daemon_that_could_not_start_again_before_a_reboot_is_not_restarted(node: Node) -> None:
    """Its program is of the new version, and the loaded modules, which jobs use, are of the old one."""
    wants(node)
    requested = [f"{BOOT}1", f"gpu_driver {BOOT}1 the driver {VERSION} is installed, and another is loaded and in use "]
    old = there(STALE, **{IN_MEMORY: "570.86.15", USERS: ["python3 (4711)", "end"], REQUESTS: requested})
    result = node.deploy(gpu_driver.install, {UNIT_FILE: [COMMAND], **old})
    assert not result.failed
    *_, replaced = result.commands[f"{PREFIX}Persistence mode"]
    assert "systemctl daemon-reload" in replaced
    assert "try-restart" not in replaced


def test_without_persistence_the_daemon_is_as_its_package_has_it(node: Node) -> None:
    wants(node, persistence=False)
    result = node.deploy(gpu_driver.install, {UNIT_FILE: [COMMAND], **there(), **files(**{services.DROP_IN: DROP_IN})})
    [removed] = result.commands[f"{PREFIX}Persistence mode"]
    assert removed.endswith(f" sh remove {services.DROP_IN} -- nvidia-persistenced.service")


def test_a_unit_that_makes_them_persistent_gets_no_drop_in(node: Node) -> None:
    wants(node)
    result = node.deploy(gpu_driver.install, {UNIT_FILE: ["/usr/bin/nvidia-persistenced --verbose"], **there()})
    assert result.flat == []


OLDER = ["nvidia-open-3:570.86.15-1.*", "libnvidia-ml-3:570.86.15-1.*"]
OTHERS = ["kernel-0:5.14.0-427.el9.*", "nvidia-container-toolkit-0:1.20.1-1.*"]


@pytest.mark.parametrize(
    ("locks", "commands"),
    [
        ([*OTHERS, *OLDER], ["add instead of libnvidia-ml nvidia-open"]),
        (OTHERS, ["add"]),
        ([*OTHERS, f"nvidia-open-3:{VERSION}-1.*"], []),
    ],
)
def test_dnf_locks_only_the_driver_at_its_version(node: Node, locks: list[str], commands: list[str]) -> None:
    wants(node)
    there = {**fresh(ROCKY_9), "versionlock.list": locks, "rpm --queryformat": "python3-dnf-plugin-versionlock 4.3-1"}
    done = node.deploy(gpu_driver.install, there).commands.get(f"{PREFIX}Version", [])
    remedy = f" '*nvidia*{VERSION}*' 'gpu_driver: the repository must have version {VERSION} of the driver'"
    ends = [command.partition(remedy)[2] for command in done if remedy in command]
    assert [f"add instead of{former}" if former else "add" for former in ends] == commands


@pytest.mark.parametrize("there", [True, False])
def test_the_former_locks_return_if_the_repository_does_not_have_the_new_version(tmp_path: Path, there: bool) -> None:
    locks, program = tmp_path / "versionlock.list", tmp_path / "dnf"
    locks.write_text("\n".join(["# by hand", *OTHERS, *OLDER]) + "\n")
    program.write_text("""#!/bin/sh
shift
case "$*" in
delete*) grep -v nvidia-open "$LOCKS" | grep -v libnvidia-ml > "$LOCKS.new"; mv "$LOCKS.new" "$LOCKS" ;;
"add --raw "*) shift 2; printf '%s\\n' "$@" >> "$LOCKS" ;;
add*) if [ "$THERE" = True ]; then echo nvidia-open-3:580.95.05-1.* >> "$LOCKS"; else exit 1; fi ;;
esac
""")
    program.chmod(0o755)
    # In the place of the node's file: the rest of the script is what it is.
    text = gpu_driver._LOCK.replace("set -f", 'locks() { sed /^#/d "$LOCKS"; }\nset -f')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOCKS": str(locks), "THERE": str(there)}
    done = subprocess.run(
        ["sh", "-ec", text, "sh", str(tmp_path / "holds"), "*nvidia*", "another version", "libnvidia-ml", "nvidia-open"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == (0 if there else 1)
    now = ["nvidia-open-3:580.95.05-1.*"] if there else OLDER
    assert locks.read_text().splitlines() == ["# by hand", *OTHERS, *now]
    assert ("another version" in done.stderr) is not there


def test_on_dnf5_no_driver_is_installed_that_could_not_be_held(node: Node) -> None:
    wants(node)
    result = node.deploy(gpu_driver.install, {**fresh(ROCKY_9), "rpm --queryformat": "dnf5 5.2.10"})
    assert "refuse: dnf on this node is dnf5" in result.commands[f"{PREFIX}Version"][0]
    assert f"{PREFIX}Packages" not in {name for name, commands in result.commands.items() if commands}


DRIVERS = ("nvidia-open", "nvidia-kernel-open-dkms", "libcuda1")
NEWER = {
    "rpm --queryformat": [
        *("nvidia-open 590.44.01-1", "nvidia-kernel-open-dkms 590.44.01-1", "nvidia-container-toolkit 1.20.1-1"),
        "python3-dnf-plugin-versionlock 4.3-1",
    ],
    "dpkg -l": [
        f"ii  {name}  amd64  something"
        for name in ("nvidia-open  590.44.01-1", "libcuda1:amd64  590.44.01-1", "libnvidia-container1:amd64  1.20.1-1")
    ],
}


REPOSITORIES = {
    "repoquery": [f"{name} {version}" for name in DRIVERS for version in ("590.44.01", VERSION)],
    "madison": [
        f"{name} {version}-1 https://example.com Packages" for name in DRIVERS for version in ("590.44.01", VERSION)
    ],
}
DOWNGRADES = [
    (ROCKY_9, "dnf distro-sync -y", "nvidia-kernel-open-dkms"),
    (DEBIAN, "apt_install --allow-downgrades", "libcuda1"),
]


@pytest.mark.parametrize(("distribution", "command", "other"), DOWNGRADES)
def test_a_downgrade_takes_all_packages_of_the_driver_along(
    node: Node, distribution: Answers, command: str, other: str
) -> None:
    wants(node, persistence=False)
    before = {**fresh(distribution), **NEWER, **REPOSITORIES}
    _, moved = node.deploy(gpu_driver.install, before).commands[f"{PREFIX}Packages"]
    assert command in moved
    assert moved.endswith(f" sh {other} nvidia-open")


def interrupted() -> Answers:
    """A node where the last deploy ended after the named package, and left its dependencies as they were."""
    return {
        each: [line.replace("590.44.01", VERSION) if "nvidia-open" in line else line for line in lines]
        for each, lines in NEWER.items()
    }


@pytest.mark.parametrize(("distribution", "command", "other"), DOWNGRADES)
def test_the_next_deploy_takes_along_what_an_interrupted_one_did_not(
    node: Node, distribution: Answers, command: str, other: str
) -> None:
    wants(node, persistence=False)
    result = node.deploy(gpu_driver.install, {**fresh(distribution), **interrupted(), **REPOSITORIES})
    assert result.planned[f"{PREFIX}Packages"]
    [moved] = result.commands[f"{PREFIX}Packages"]
    assert command in moved
    assert moved.endswith(f" sh {other}")
    # The repositories have no other version of it: it is of no use to this one, and every deploy would try again.
    without = node.deploy(gpu_driver.install, {**fresh(distribution), **interrupted()})
    assert not without.planned[f"{PREFIX}Packages"]


def test_dnf_leaves_packages_alone_that_the_lock_does_not_keep_at_the_version(node: Node) -> None:
    # dnf distro-sync would take the newest version, at each deploy.
    wants(node, persistence=False)
    have = {"rpm --queryformat": [f"nvidia-open {VERSION}-1.el9", "libnvsdm 590.44.01-1.el9"]}
    result = node.deploy(
        gpu_driver.install,
        {**fresh(ROCKY_9), **have, "repoquery": [f"libnvsdm {VERSION}"], USERS: ["python3 (4711)", "end"]},
    )
    assert not result.planned[f"{PREFIX}Packages"]
    assert not any("refuse: gpu_driver: libnvsdm" in command for command in result.flat)


def test_packages_that_an_interrupted_deploy_left_are_not_replaced_while_in_use(node: Node) -> None:
    wants(node, persistence=False)
    result = node.deploy(
        gpu_driver.install, {**fresh(DEBIAN), **interrupted(), **REPOSITORIES, USERS: ["python3 (4711)", "end"]}
    )
    [refused] = result.flat
    assert refused.startswith(
        f"refuse: gpu_driver: libcuda1 {VERSION} is not installed while GPUs are in use by python3 "
    )


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
    wants(node, source="distribution")
    result = node.deploy(gpu_driver.install, {**there(), **UBUNTU})
    assert f"{PREFIX}nvidia-driver: no repository" in result.planned
    assert result.commands[f"{PREFIX}Packages"][0].endswith(
        f" 'nvidia-headless-580-server-open={VERSION}-*' 'nvidia-utils-580-server={VERSION}-*'"
    )


@pytest.mark.parametrize(
    ("users", "named"),
    [
        (["python3 (4711)", "nv-hostengine (9)", "end"], "in use by python3 (4711), nv-hostengine (9): programs"),
        ([f"python3 ({n})" for n in range(10)] + ["end"], "python3 (7) and 2 more: programs"),
        ([], "in use by unknown processes: programs"),
    ],
)
def test_a_driver_in_use_is_not_replaced(node: Node, users: list[str], named: str) -> None:
    wants(node)
    result = node.deploy(gpu_driver.install, {**fresh(DEBIAN), **debs("570.86.15-1"), USERS: users})
    assert result.failed
    # Not even apt's preferences, by which apt would replace it at the next upgrade.
    assert result.uploads == {}
    [refused] = result.flat
    assert refused.startswith(
        f"refuse: gpu_driver: nvidia-open, nvidia-persistenced {VERSION} is not installed while GPUs are"
    )
    assert named in refused
    assert "drain the node" in refused


@pytest.mark.parametrize("version", ["580.95.05-1", "3:580.95.05-1.el9", "580.95.05-0ubuntu1"])
def test_a_package_s_version_has_the_driver_s(version: str) -> None:
    assert gpu_driver._is(VERSION, version)
    assert not gpu_driver._is("580.95", version)
    assert not gpu_driver._is("80.95.05", version)


def test_another_loaded_driver_is_replaced_if_nothing_uses_it(node: Node) -> None:
    wants(node)
    result = node.deploy(gpu_driver.install, there(), there(nvidia=STALE))
    # In this test's answers it stays loaded, so the last resort is a reboot.
    reloaded, initramfs, request = result.commands[f"{PREFIX}Loaded modules"]
    assert "rmmod" in reloaded
    assert " sh yes " in reloaded
    assert "update-initramfs -u" in initramfs
    assert request.endswith(f"gpu_driver 'the driver {VERSION} is installed, and another could not be unloaded'")


def test_another_loaded_driver_in_use_requests_a_reboot(node: Node) -> None:
    wants(node)
    result = node.deploy(gpu_driver.install, there(nvidia=STALE, **{USERS: ["python3 (7)", "end"]}))
    initramfs, request = result.commands[f"{PREFIX}Loaded modules"]
    assert "update-initramfs -u" in initramfs
    # The reason stays the same while others use it.
    assert request.endswith(f"'the driver {VERSION} is installed, and another is loaded and in use'")
    assert any("gpu_driver: the loaded driver is in use by python3 (7)" in line for line in result.log)


def test_a_loaded_driver_of_another_version_is_not_the_installed_one(node: Node) -> None:
    wants(node)
    # The same srcversion: only the version differs.
    result = node.deploy(gpu_driver.install, {**there(), IN_MEMORY: "570.86.15"}, there())
    assert result.planned[f"{PREFIX}Loaded modules"]
    assert result.flat == []


def test_a_package_is_added_while_jobs_run(node: Node) -> None:
    wants(node, fabric_manager=True)
    result = node.deploy(gpu_driver.install, there(**{USERS: ["python3 (7)", "end"]}))
    assert not result.failed
    assert f"nvidia-fabricmanager={VERSION}-*" in result.commands[f"{PREFIX}Packages"][0]


def test_nouveau_requests_a_reboot_once(node: Node) -> None:
    wants(node)
    nouveau = ["path /lib/modules/K/kernel/nouveau.ko", "installed ", "users 1", "loaded "]
    answers = {**there(nvidia=ABSENT), " sh nouveau": nouveau}
    initramfs, request = node.deploy(gpu_driver.install, answers).commands[f"{PREFIX}Loaded modules"]
    assert "update-initramfs -u" in initramfs
    assert request.endswith(f"gpu_driver 'nouveau is loaded, which the driver {VERSION} replaces'")
    requested = [f"{BOOT}1", f"gpu_driver {BOOT}1 nouveau is loaded, which the driver {VERSION} replaces "]
    waiting = {**answers, REQUESTS: requested, STATE: ["LoadState=loaded UnitFileState=disabled "], SMI: ["failed x"]}
    result = node.deploy(gpu_driver.install, waiting)
    # Until the reboot nothing else is done, and nothing fails.
    assert result.flat == []
    assert not result.failed


def test_what_is_built_for_a_kernel_waits_until_that_kernel_runs(node: Node) -> None:
    wants(node)
    node.data["kernel"] = {"release": "6.1.0-10-amd64"}
    result = node.deploy(
        gpu_driver.install, there(nvidia=["path "], **{BUILDS: "", SMI: ["missing"], STATE: ["LoadState=not-found"]})
    )
    assert result.flat == []
    assert not result.failed


@pytest.mark.parametrize(
    ("answers", "refused"),
    [
        ({BUILDS: "nvidia-fs/2.20: added"}, f"DKMS has no module nvidia {VERSION}"),
        ({" sh nvidia": ["path "]}, "the running kernel has no module nvidia; `dkms status` shows what was built"),
        (
            {"licence=$(modinfo": ["installed", "driver NVIDIA"]},
            "the licence of the installed nvidia is NVIDIA, which does not fit open True; remove the package",
        ),
        (
            {STATE: ["ActiveState=inactive LoadState=not-found UnitFileState= "]},
            "the node has no nvidia-persistenced.service",
        ),
        ({SMI: ["missing"]}, "the node has no nvidia-smi"),
        (
            {SMI: ["failed No devices were found"]},
            f"should print the driver's version {VERSION}, but says: No devices were found",
        ),
        ({SMI: ["version 570.86.15"]}, "but says: 570.86.15"),
        ({SMI: []}, "but says: nothing"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(node: Node, answers: Answers, refused: str) -> None:
    wants(node)
    result = node.deploy(gpu_driver.install, there(), {**there(), **answers})
    assert result.failed
    assert result.flat[-1].startswith("refuse: gpu_driver")
    assert refused in result.flat[-1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "the key 'version' is missing"),
        ({"version": "580"}, "version: '580' is not valid; give it as nvidia-smi prints it, as 580.95.05"),
        ({"version": "580.95.05-1"}, "is not valid"),
        ({"version": VERSION, "source": "runfile"}, 'source: "runfile" is not one of vendor, distribution'),
        ({"version": VERSION, "fabric_manager": "yes"}, '"yes" is not true or false'),
        ({"version": VERSION, "branch": 580}, "unknown key 'branch'"),
        (
            {
                "version": VERSION,
                "source": "distribution",
                "repository": {"uri": "http://a.example", "key": "http://a.example/k", "fingerprint": "0" * 40},
            },
            "repository: it replaces NVIDIA's; give the source 'vendor'",
        ),
    ],
)
def test_bad_data_is_refused(node: Node, data: dict[str, Any], message: str) -> None:
    node.data = {"gpu_driver": data}
    with pytest.raises(DeployError) as caught:
        node.deploy(gpu_driver.install, DEBIAN)
    assert str(caught.value).startswith("@fake/node-a.gpu_driver: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("machine", "data", "message"),
    [
        (
            "x86_64",
            {"source": "distribution"},
            "only Ubuntu's own packages are supported, and the node has Debian 12; give the source",
        ),
        (
            "riscv64",
            {},
            "NVIDIA's repository for Debian 12 on riscv64 is not known; give its uri, key and fingerprint here",
        ),
    ],
)
def test_a_system_without_such_packages_is_refused(
    node: Node, machine: str, data: dict[str, Any], message: str
) -> None:
    wants(node, **data)
    with pytest.raises(DeployError, match=re.escape(message)):
        node.deploy(gpu_driver.install, {**DEBIAN, "uname -m": machine})


# The scripts
