"""Reloads of systemd's units beside containers with GPUs. systemctl is a stand-in, and /dev/null's node stands for a GPU's."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks import agent, original_state, pull, removal
from tasks.agent import AgentService
from tasks.common import systemd_reload, units
from tasks.common.status import COMMAND
from tasks.common.texts import Present
from tasks.containers import container_runtime
from tasks.drivers import erdma
from tasks.drivers.gpu_driver import services
from tasks.drivers.ofed import mlnx_ofed
from tasks.host import irqbalance, limits
from tasks.kubernetes import kubelet, reporter
from tasks.packages import INTERPRETERS, vendor_repository
from tests.deploy.conftest import LOSERS, Answers, Node, file_answers, of
from tests.deploy.scripts import sh
from tests.programs import failure
from tests.stand_ins import program, text_file

SLICE = "/kubepods.slice/kubepods-pod1.slice"
NUMBER = "1:3"  # of /dev/null


def container(root: Path, name: str, gpus: tuple[str, ...], cgroups: str = "") -> str:
    """A running container with these GPUs; its scope's name."""
    scope, process = f"{name}.scope", str(len(list(root.glob("proc/*"))) + 10)
    group = root / f"sys/fs/cgroup{cgroups}{SLICE}/{scope}"
    text_file(group / "cgroup.procs", f"{process}\n99\n")
    devices = root / "proc" / process / "root/dev"
    devices.mkdir(parents=True)
    for gpu in gpus:
        (devices / gpu).symlink_to("/dev/null")
    return scope


def shown(scope: str, *allow: str, policy: str = "strict") -> str:
    """A scope as `systemctl show` prints it: the properties in systemd's own order, and a line for each device."""
    lines = [f"ControlGroup={SLICE}/{scope}", f"DevicePolicy={policy}", *(f"DeviceAllow={each} rwm" for each in allow)]
    return "\n".join([*lines, f"Id={scope}", ""])


def losers(root: Path, *scopes: str) -> list[str]:
    (root / "units").mkdir(exist_ok=True)
    for scope in scopes:
        (root / "units" / scope.rpartition("Id=")[2].strip()).write_text(f"{scope}\n")
    # A unit's name may be a pattern.
    program(root / "bin/systemctl", f"cd {root}/units; shift; for unit; do cat $unit 2>/dev/null; done")
    text = f'{systemd_reload._LOSERS}gpu_losers "$1"\n'
    answer = sh(text, root, programs=root / "bin")
    return systemd_reload.GpuLosers().process(answer)


@pytest.mark.parametrize(
    ("allow", "lost"),
    [
        (("/dev/char/1:9", "char-pts"), True),
        ((), True),
        ((f"/dev/char/{NUMBER}",), False),
        (("/dev/char/1:9", f"/dev/char/{NUMBER}", "char-pts"), False),
        (("/dev/nvidia0",), False),
        (("char-nvidia-frontend",), False),
        (("char-*", "block-*"), False),
    ],
)
@pytest.mark.parametrize(("cgroups", "name"), [("", "nerdctl-a"), ("/systemd", "cri-containerd-a")])
def test_a_container_whose_scope_does_not_list_its_gpu_would_lose_it(
    tmp_path: Path, allow: tuple[str, ...], lost: bool, cgroups: str, name: str
) -> None:
    with_gpu = container(tmp_path, name, ("nvidia0", "nvidiactl"), cgroups)
    without = container(tmp_path, "docker-b", (), cgroups)
    answer = losers(tmp_path, shown(without, "char-pts"), shown(with_gpu, *allow))
    assert answer == ([with_gpu] if lost else [])


def test_a_container_that_may_use_all_devices_loses_none(tmp_path: Path) -> None:
    privileged = container(tmp_path, "crio-a", ("nvidia0",))
    gone = shown("docker-gone.scope")
    assert losers(tmp_path) == []
    login = shown("session-4.scope", policy="auto")
    assert losers(tmp_path, shown(privileged, policy="auto"), gone, login) == []


@pytest.mark.parametrize("former", [None, "../nvidia-caps/nvidia-cap9", "/dev/zero"])
def test_links_that_systemd_needs_are_made_before_the_reload(tmp_path: Path, former: str | None) -> None:
    """Also if the number was another node's: some of the driver's numbers change when it is loaded again."""
    for folder in ("dev/char", "dev/nvidia-caps"):
        (tmp_path / folder).mkdir(parents=True)
    for node in ("nvidia0", "nvidia-caps/nvidia-cap1", "null"):
        (tmp_path / "dev" / node).symlink_to("/dev/null")
    if former is not None:
        (tmp_path / "dev/char/195:255").symlink_to(former)
    # GNU stat prints hexadecimal numbers. Both nodes are links to one device here, so it goes by the name.
    program(
        tmp_path / "bin/stat",
        'case "$2 $3" in "%t "*cap1) echo ee ;; "%T "*cap1) echo 1 ;; %t*) echo c3 ;; *) echo ff ;; esac',
    )
    program(tmp_path / "bin/systemctl", f'ls {tmp_path}/dev/char > {tmp_path}/before; echo "$@" > {tmp_path}/asked')
    text = systemd_reload.RELOAD.replace("/dev/char", f"{tmp_path}/dev/char")
    text = text.replace("/dev/nvidia", f"{tmp_path}/dev/nvidia").replace("#/dev", f"#{tmp_path}/dev")
    for _ in range(2):
        sh(text, programs=tmp_path / "bin")
        assert (tmp_path / "asked").read_text() == "daemon-reload\n"
        assert (tmp_path / "before").read_text().split() == ["195:255", "238:1"]
        assert (tmp_path / "dev/char/195:255").readlink() == Path("../nvidia0")
        assert (tmp_path / "dev/char/238:1").readlink() == Path("../nvidia-caps/nvidia-cap1")


def test_units_are_on_the_disk_before_systemd_reads_them(tmp_path: Path) -> None:
    """After a power cut systemd would take an empty unit for a masked one."""
    for name in ("sync", "systemctl"):
        program(tmp_path / "bin" / name, f'echo {name} "$@" >> {tmp_path}/asked')
    sh(systemd_reload.RELOAD, programs=tmp_path / "bin")
    assert (tmp_path / "asked").read_text() == "sync -f /etc\nsystemctl daemon-reload\n"


INSTALLING = [vendor_repository._APT, vendor_repository._DNF, erdma._INSTALL, mlnx_ofed._INSTALL]


@pytest.mark.parametrize("text", INSTALLING)
def test_nothing_is_installed_while_a_package_s_reload_would_take_gpus(tmp_path: Path, text: str) -> None:
    scope = container(tmp_path, "cri-containerd-a", ("nvidia0",))
    (tmp_path / "shown").write_text(shown(scope))
    program(tmp_path / "bin/systemctl", f"cat {tmp_path}/shown")
    for name in ("apt-get", "dnf", "curl", "uname", "find"):
        program(tmp_path / "bin" / name, f"echo {name} >> {tmp_path}/ran")
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "MACHINE": str(tmp_path)}
    words = ["sh", "-ec", text, "sh", "", "", "", ""]
    said = failure(subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False))
    assert f" containers ({scope}): a toolkit before 1.18" in said
    assert not (tmp_path / "ran").exists()


TAKEN: Answers = {LOSERS: ["cri-containerd-a.scope"]}
OLD_DAEMON: Answers = {"DropInPaths": "/usr/bin/nvidia-persistenced --no-persistence-mode"}


@pytest.mark.parametrize(("state", "starts"), [("inactive", True), ("active", False)])
def test_a_unit_is_started_and_not_yet_enabled_while_that_would_take_gpus(node: Node, state: str, starts: bool) -> None:
    unit = {"UnitFileState": [f"ActiveState={state} LoadState=loaded UnitFileState=disabled "]}

    def code() -> None:
        units.enabled(name="x", unit="containerd.service", missing="", failed="")

    commands = node.deploy(code, {**unit, **TAKEN}).flat
    assert [("systemctl start" in each, "systemctl enable" in each) for each in commands] == [(True, False)] * starts
    assert all("systemctl enable" in command for command in node.deploy(code, unit).flat)


@pytest.mark.parametrize(
    ("data", "code", "answers"),
    [
        ({"limits": {}}, limits.lift, {}),
        ({"kubelet": {"policy": "hold"}}, kubelet.gate, {}),
        ({}, lambda: irqbalance.use_script(name="x", banned=True), {}),
        ({}, lambda: services.persistence_mode(name="x", wanted=True), OLD_DAEMON),
    ],
)
def test_what_needs_a_reload_waits_while_that_would_take_gpus(
    node: Node, data: dict[str, Any], code: Callable[[], object], answers: Answers
) -> None:
    node.data = data
    assert any("systemctl daemon-reload" in command for command in node.deploy(code, answers).flat)
    result = node.deploy(code, {**answers, **TAKEN})
    assert not result.failed
    assert result.flat == []
    assert any("deferred: " in line and "(cri-containerd-a.scope)" in line for line in result.log)


STOPPED: Answers = {of(units.UnitStates): ["ActiveState=inactive LoadState=loaded UnitFileState=disabled "]}
STARTED: Answers = {
    of(AgentService): ["ActiveState=active", "UnitFileState=disabled", "NeedDaemonReload=no"],
    **file_answers(COMMAND, agent.launcher_text(INTERPRETERS[0]), mode="-rwxr-xr-x"),
}
REMOVABLE: Answers = {
    of(Present): [agent.BASE],
    of(original_state.Recorded): ["here", "irqbalance enabled active"],
    of(original_state.Current): ["irqbalance disabled inactive"],
}


@pytest.mark.parametrize(
    ("code", "answers"),
    [
        (lambda: container_runtime.enable_cdi_refresh(name="x"), STOPPED),
        (lambda: pull.run(name="x", units=()), {}),
        (pull.serve, {of(Present): [pull.SETTINGS]}),
        (lambda: reporter.run(name="x", version="1.0", unit=agent.launcher(name="y")), STARTED),
        (lambda: units.enabled(name="x", unit="x.service", missing="", failed=""), STOPPED),
        (lambda: irqbalance.policy("disabled"), {of(units.UnitStates): ["ActiveState=active UnitFileState=enabled "]}),
        (removal.remove_all, REMOVABLE),
    ],
    ids=["CDI's units", "timer", "no timer", "reporter", "unit", "irqbalance", "removal"],
)
def test_no_unit_is_enabled_or_disabled_while_that_would_take_gpus(
    node: Node, code: Callable[[], object], answers: Answers
) -> None:
    """systemctl has systemd read its units again then, so the links of those that lose none must be there, too."""
    enabling = re.compile("systemctl (enable|disable)")
    commands = "\n".join(node.deploy(code, answers).flat)
    [links, first] = [commands.find(systemd_reload.LINKS), *(each.start() for each in enabling.finditer(commands))][:2]
    assert 0 <= links < first
    result = node.deploy(code, {**answers, **TAKEN})
    assert not any(map(enabling.search, result.flat))
    assert any("(cri-containerd-a.scope)" in line for line in result.log)


@pytest.mark.parametrize(("state", "restarted"), [("loaded", ["unit.service"]), ("not-found", [])])
def test_a_unit_that_is_gone_is_not_restarted(tmp_path: Path, state: str, restarted: list[str]) -> None:
    """As irqbalance.service once its package is removed: the deploy has a drop-in of it left to remove."""
    restart = f"[ {state} = loaded ] || {{ echo Unit $2 not found. >&2; exit 5; }}; echo $2"
    program(
        tmp_path / "bin/systemctl", f"case $1 in show) echo {state} ;; try-restart) {restart} ;; daemon-reload) ;; esac"
    )
    assert sh(systemd_reload.RESTART, "unit.service", programs=tmp_path / "bin") == restarted


def test_a_unit_that_cannot_be_restarted_is_an_error(tmp_path: Path) -> None:
    """Otherwise the deploy would succeed, and the unit would go on with its former files."""
    program(
        tmp_path / "bin/systemctl", "case $1 in show) echo loaded ;; try-restart) echo Job failed. >&2; exit 1 ;; esac"
    )
    with pytest.raises(AssertionError, match="Job failed"):
        sh(systemd_reload.RESTART, "unit.service", programs=tmp_path / "bin")


def test_a_container_that_ends_meanwhile_hides_no_other(tmp_path: Path) -> None:
    first, second = (container(tmp_path, name, ("nvidia0",)) for name in ("docker-a", "docker-b"))
    [ended] = tmp_path.glob("proc/10")
    program(tmp_path / "bin/stat", f'rm -rf {ended}; exec {shutil.which("stat")} "$@"')
    assert losers(tmp_path, shown(first, "/dev/null"), shown(second, "/dev/null")) == [second]
