"""The driver's version: dnf's module streams and locks, other versions of packages, and when none is replaced."""

from pathlib import Path

import pytest

from tasks.common.commands import script
from tasks.drivers import gpu_driver
from tasks.drivers.gpu_driver import services, versions
from tasks.packages import AvailableVersions
from tasks.packages.holds import HeldPackages
from tests.deploy.conftest import DEBIAN, ROCKY_9, Answers, Node, files, of
from tests.deploy.drivers.gpu_node import PREFIX, USERS, VERSION, debs, deploy, fresh, there, wants
from tests.deploy.scripts import ran, sh
from tests.deploy.systems import dpkg, rpm
from tests.stand_ins import program


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
    have = rpm(*(f"{name}={VERSION}-1.el9" for name in ("nvidia-open", "cuda-drivers", services.PERSISTENCE)))
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
    log = tmp_path / "log"
    has = 'case " $STREAMS " in *" ${3#*:} "*) exit ;; *) exit 1 ;; esac'
    program(tmp_path / "dnf", f'shift 2\nif [ "$2" = list ]; then {has}; fi\necho "$*" >> {log}')
    log.touch()
    sh(gpu_driver._STREAM, "580-open", "open-dkms", programs=tmp_path, STREAMS=" ".join(there))
    assert log.read_text().splitlines() == ran


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
    there = {**fresh(ROCKY_9), of(HeldPackages): locks, **rpm("python3-dnf-plugin-versionlock")}
    done = deploy(node, there).commands.get(f"{PREFIX}Version", [])
    remedy = f" '*nvidia*{VERSION}*' 'gpu_driver: the repository must have version {VERSION} of the driver'"
    ends = [command.partition(remedy)[2] for command in done if remedy in command]
    assert [f"add instead of{former}" if former else "add" for former in ends] == commands


VERSIONLOCK = r"""
shift 2  # --setopt=exit_on_lock=1 versionlock
case "$*" in
delete*) grep -v nvidia-open "$LOCKS" | grep -v libnvidia-ml > "$LOCKS.new"; mv "$LOCKS.new" "$LOCKS" ;;
"add --raw "*) shift 2; printf '%s\n' "$@" >> "$LOCKS" ;;
add*) if [ "$THERE" = True ]; then echo nvidia-open-3:580.95.05-1.* >> "$LOCKS"; else exit 1; fi ;;
esac
"""


@pytest.mark.parametrize("there", [True, False])
def test_the_former_locks_return_if_the_repository_does_not_have_the_new_version(tmp_path: Path, there: bool) -> None:
    locks = tmp_path / "versionlock.list"
    locks.write_text("\n".join(["# by hand", *OTHERS, *OLDER]) + "\n")
    program(tmp_path / "dnf", VERSIONLOCK)
    # Only the function that lists the locks is replaced: it would read the node's own file.
    text = gpu_driver._LOCK.replace("set -f", 'locks() { sed /^#/d "$LOCKS"; }\nset -f')
    command = script(text, f"{tmp_path}/holds", "*nvidia*", "another version", "libnvidia-ml", "nvidia-open")
    done = ran(command, tmp_path, LOCKS=str(locks), THERE=str(there))
    assert done.returncode == (0 if there else 1)
    now = ["nvidia-open-3:580.95.05-1.*"] if there else OLDER
    assert locks.read_text().splitlines() == ["# by hand", *OTHERS, *now]
    assert ("another version" in done.stderr) is not there


def test_on_dnf5_no_driver_is_installed_that_could_not_be_held(node: Node) -> None:
    result = deploy(node, {**fresh(ROCKY_9), **rpm("dnf5")})
    assert "refuse: dnf on this node is dnf5" in result.commands[f"{PREFIX}Version"][0]
    assert f"{PREFIX}Packages" not in {name for name, commands in result.commands.items() if commands}


DRIVERS = ("nvidia-open", "nvidia-kernel-open-dkms", "libcuda1")
NEWER = {
    **rpm("nvidia-open=590.44.01-1", "nvidia-kernel-open-dkms=590.44.01-1", "nvidia-container-toolkit=1.20.1-1",
          "python3-dnf-plugin-versionlock"),
    **dpkg("nvidia-open=590.44.01-1", "libcuda1=590.44.01-1", "libnvidia-container1=1.20.1-1"),
}  # fmt: skip
REPOSITORIES = {of(AvailableVersions): [f"{name} {each}-1 x" for name in DRIVERS for each in ("590.44.01", VERSION)]}
DOWNGRADES = [
    (ROCKY_9, "dnf install -y", f"'nvidia-kernel-open-dkms-{VERSION}-*'"),
    (DEBIAN, "apt_install --allow-downgrades", f"'libcuda1={VERSION}-*'"),
]


@pytest.mark.parametrize(("distribution", "command", "other"), DOWNGRADES)
def test_a_downgrade_takes_all_packages_of_the_driver_along(
    node: Node, distribution: Answers, command: str, other: str
) -> None:
    before = {**fresh(distribution), **NEWER, **REPOSITORIES}
    _, moved = deploy(node, before, persistence=False).commands[f"{PREFIX}Packages"]
    assert command in moved
    assert moved.endswith(f" {other}")


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
    assert moved.endswith(f" {other}")
    # The repositories have no other version of it: it is of no use to this one, and every deploy would try again.
    without = node.deploy(gpu_driver.install, {**fresh(distribution), **interrupted()})
    assert not without.planned[f"{PREFIX}Packages"]


def test_dnf_leaves_packages_alone_that_the_lock_does_not_keep_at_the_version(node: Node) -> None:
    # dnf distro-sync would take the newest version, at each deploy.
    have = rpm(f"nvidia-open={VERSION}-1.el9", "libnvsdm=590.44.01-1.el9")
    used = {of(AvailableVersions): [f"libnvsdm {VERSION}"], USERS: ["python3 (4711)"]}
    result = deploy(node, {**fresh(ROCKY_9), **have, **used}, persistence=False)
    assert not result.planned[f"{PREFIX}Packages"]
    assert not any("refuse: gpu_driver: libnvsdm" in command for command in result.flat)


def test_packages_that_an_interrupted_deploy_left_are_not_replaced_while_in_use(node: Node) -> None:
    used = {USERS: ["python3 (4711)"]}
    [refused] = deploy(node, {**fresh(DEBIAN), **interrupted(), **REPOSITORIES, **used}, persistence=False).flat
    assert refused.startswith(f"refuse: gpu_driver: libcuda1 {VERSION} is not ")


@pytest.mark.parametrize(
    ("users", "named"),
    [
        (["python3 (4711)", "nv-hostengine (9)"], "in use by python3 (4711), nv-hostengine (9): programs"),
        ([f"python3 ({n})" for n in range(10)], "python3 (7) and 2 more: programs"),
    ],
)
def test_a_driver_in_use_is_not_replaced(node: Node, users: list[str], named: str) -> None:
    result = deploy(node, {**fresh(DEBIAN), **debs("570.86.15-1"), USERS: users})
    assert result.failed
    # Not even apt's preferences, by which apt would replace it at the next upgrade.
    assert result.uploads == {}
    [refused] = result.flat
    assert f" nvidia-open, nvidia-persistenced {VERSION} is not" in refused and named in refused


@pytest.mark.parametrize("version", ["580.95.05-1", "3:580.95.05-1.el9", "580.95.05-0ubuntu1"])
def test_a_package_s_version_has_the_driver_s(version: str) -> None:
    assert versions.is_at(VERSION, version)
    assert not versions.is_at("580.95", version)
    assert not versions.is_at("80.95.05", version)


def test_a_package_is_added_while_jobs_run(node: Node) -> None:
    result = deploy(node, there(**{USERS: ["python3 (7)"]}), fabric_manager=True)
    assert not result.failed
    assert f"nvidia-fabricmanager={VERSION}-*" in result.commands[f"{PREFIX}Packages"][0]
