"""The scripts that run on nodes, run here for real, in a folder of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
import time
from hashlib import sha256
from pathlib import Path

import pytest

from agent.kinds.host.irqbalance import LIST
from tasks import agent, node_spec, packages, pull, reboot
from tasks.common import texts
from tasks.common.commands import script
from tasks.host import boot, irqbalance, network_managers
from tasks.packages import holds


def sh(text: str, *arguments: object, **environment: str) -> list[str]:
    """Run a script as a task does."""
    done = subprocess.run(
        shlex.split(str(script(text, *map(str, arguments)))),
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "versions").mkdir()
    return tmp_path


def staged(base: Path, *versions: str) -> None:
    for version in versions:
        (base / "versions" / version).mkdir()


def versions(base: Path) -> agent.Versions:
    message = sh(agent._VERSIONS, base)
    return agent.AgentVersions().process(message) if message else agent.Versions()


def upload(base: Path, source: str) -> Path:
    (base / "agent.py").write_text(source)
    archive = base / "uploaded.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(base / "agent.py", "agent.py")
    (base / "agent.py").unlink()
    return archive


def test_a_node_without_an_agent_has_no_versions(tmp_path: Path) -> None:
    assert versions(tmp_path / "absent") == agent.Versions()
    assert versions(tmp_path) == agent.Versions()


def unpack(base: Path, archive: Path, checksum: str = "") -> None:
    checksum = checksum or sha256(archive.read_bytes()).hexdigest()
    sh(agent._UNPACK, archive, base / "versions", "1-a", sys.executable, checksum)


def test_an_archive_is_unpacked_and_compiled(base: Path) -> None:
    uploaded = upload(base, "print('here')\n")
    unpack(base, uploaded)
    folder = base / "versions" / "1-a"
    assert [path.name for path in (base / "versions").iterdir()] == ["1-a"]
    assert {path.stat().st_mode & 0o777 for path in (base, base / "versions", folder)} == {0o755}
    assert len(list(folder.rglob("*.pyc"))) == 1
    assert not uploaded.exists()


def test_other_users_can_read_the_agent_whatever_the_umask_is(base: Path) -> None:
    base.chmod(0o700)
    uploaded = upload(base, "print('here')\n")
    before = os.umask(0o077)
    try:
        unpack(base, uploaded)
    finally:
        os.umask(before)
    there = [base, *(base / "versions").rglob("*")]
    assert len(there) > 3
    assert {path.stat().st_mode & 0o777 for path in there} == {0o755, 0o644}


def test_what_a_deploy_left_that_was_interrupted_is_removed(base: Path) -> None:
    (base / "0-z.tar.gz").write_text("half")
    os.utime(base / "0-z.tar.gz", (0, 0))
    unpack(base, upload(base, "x = 1\n"))
    assert [path.name for path in base.iterdir()] == ["versions"]


def test_unpack_leaves_nothing_behind_when_it_fails(base: Path) -> None:
    broken = base / "uploaded.tar.gz"
    broken.write_bytes(b"not an archive")
    with pytest.raises(AssertionError, match="gzip"):
        unpack(base, broken)
    assert list((base / "versions").iterdir()) == []
    assert not broken.exists()


def test_an_archive_that_was_exchanged_on_its_way_is_not_unpacked(base: Path) -> None:
    sent = sha256(upload(base, "print('ours')\n").read_bytes()).hexdigest()
    exchanged = upload(base, "print('theirs')\n")
    with pytest.raises(AssertionError, match="is not what the control host sent; run the deploy again"):
        unpack(base, exchanged, sent)
    assert list((base / "versions").iterdir()) == []
    assert not exchanged.exists()


def test_a_version_that_another_deploy_has_unpacked_is_left(base: Path) -> None:
    for _ in range(2):
        unpack(base, upload(base, "x = 1\n"))
    assert [path.name for path in (base / "versions").iterdir()] == ["1-a"]


def test_a_switch_keeps_only_the_previous_version(base: Path) -> None:
    staged(base, "1-a")
    sh(agent._SWITCH, base, "1-a", "")
    assert versions(base) == agent.Versions("1-a", None, frozenset({"1-a"}))
    staged(base, "2-b")
    sh(agent._SWITCH, base, "2-b", "1-a")
    assert versions(base) == agent.Versions("2-b", "1-a", frozenset({"1-a", "2-b"}))
    staged(base, "3-c")
    sh(agent._SWITCH, base, "3-c", "2-b")
    assert versions(base) == agent.Versions("3-c", "2-b", frozenset({"2-b", "3-c"}))
    # Back to the version before, and again: nothing is lost.
    for _ in range(2):
        sh(agent._SWITCH, base, "2-b", "3-c")
        assert versions(base) == agent.Versions("2-b", "3-c", frozenset({"2-b", "3-c"}))
    assert sorted(path.name for path in base.iterdir()) == ["current", "previous", "versions"]


def test_the_version_that_runs_stays_if_a_deploy_was_interrupted_after_its_switch(base: Path) -> None:
    staged(base, "1-a")
    sh(agent._SWITCH, base, "1-a", "")
    staged(base, "2-b")
    sh(agent._SWITCH, base, "2-b", "1-a")
    staged(base, "3-c")
    sh(agent._SWITCH, base, "3-c", "1-a")
    assert versions(base) == agent.Versions("3-c", "1-a", frozenset({"1-a", "3-c"}))


def test_replace_keeps_the_previous_spec(tmp_path: Path) -> None:
    spec = tmp_path / "node.json"
    for text in ("one", "two", "three"):
        (tmp_path / "node.json.new").write_text(text)
        sh(node_spec._REPLACE, spec)
    assert spec.read_text() == "three"
    assert (tmp_path / "node.json.previous").read_text() == "two"
    assert spec.stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.json", "node.json.previous"]


def test_a_file_without_a_final_line_end_does_not_hide_the_next(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "absent", tmp_path / "two"]
    paths[0].write_text("a\nb")
    paths[2].write_text("c\n")
    assert texts.Texts().process(sh(texts.READ, *paths)) == {str(paths[0]): "a\nb\n", str(paths[2]): "c\n"}


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """The list of an apt-mark that refuses to hold `refused`, and is interrupted after it has held `last`."""
    file = tmp_path / "held"
    program(
        tmp_path / "bin/apt-mark",
        f"""
        if [ "$1" != hold ]; then exec cat {file}; fi
        if [ "$2" = refused ]; then exit 7; fi
        echo "$2" >> {file}
        if [ "$2" = last ]; then kill -9 "$PPID"; fi
        """,
    )
    return file


def hold(tmp_path: Path, package: str) -> int:
    """Hold a package as a task does; the exit status."""
    command = script(f'{holds.NOTED}noted "$@"', f"{tmp_path}/var/holds", "apt-mark", "hold", package)
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    return subprocess.run(shlex.split(str(command)), env={"PATH": path}, check=False).returncode


@pytest.mark.parametrize("others", ["", "mine\n"])
def test_only_holds_that_a_command_sets_are_noted(tmp_path: Path, held: Path, others: str) -> None:
    held.write_text(others)
    assert [hold(tmp_path, package) for package in ("ours", "refused", "other")] == [0, 7, 0]
    assert held.read_text() == f"{others}ours\nother\n"
    assert (tmp_path / "var/holds").read_text() == "ours\nother\n"
    assert [path.name for path in (tmp_path / "var").iterdir()] == ["holds"]


@pytest.mark.parametrize("others", ["", "mine\n"])
def test_holds_of_an_interrupted_deploy_are_noted_by_the_next(tmp_path: Path, held: Path, others: str) -> None:
    held.write_text(others)
    assert hold(tmp_path, "last") == -9
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    sh(f'{holds.NOTED}note "$1"', tmp_path / "var/holds", PATH=path)
    held.write_text(f"{held.read_text()}mine too\n")
    sh(f'{holds.NOTED}note "$1"', tmp_path / "var/holds", PATH=path)
    assert hold(tmp_path, "ours") == 0
    assert (tmp_path / "var/holds").read_text() == "last\nours\n"


def test_the_first_python_that_works_is_found() -> None:
    assert sh(packages.FIND_PYTHON, "/absent/python3", "/bin/false", sys.executable) == [sys.executable]
    assert sh(packages.FIND_PYTHON, "/absent/python3") == []


PLANNER = """
import sys
print(sys.argv[1:], file=sys.stderr)
print('{"spec_hash": "x", "changes": [], "errors": ["%s"]}' % sys.stdin.read().strip())
sys.exit(2)
"""


def plan(base: Path, version: str) -> list[str]:
    done = subprocess.run(
        ["sh", "-ec", node_spec._PLAN, "sh", sys.executable, str(base / "versions" / version), str(base / "current")],
        input="the spec", capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_the_command_finds_another_python_if_an_upgrade_has_removed_the_one_of_the_deploy(base: Path) -> None:
    (base / "current").write_text("import sys; print(sys.argv[1:])")
    command = base / "trackbed"

    def run(*interpreters: object) -> subprocess.CompletedProcess[str]:
        first, second = map(str, interpreters)
        text = agent.launcher_text("/absent/python3.11").replace(agent.BASE, str(base))
        command.write_text(
            text.replace(f"{packages.INTERPRETERS[0]} {packages.INTERPRETERS[1]};", f"{first} {second};")
        )
        return subprocess.run(["sh", str(command), "plan", "a b"], capture_output=True, text=True, check=False)

    done = run("/absent/python3", sys.executable)
    assert (done.returncode, done.stdout) == (0, "['plan', 'a b']\n")
    without = run("/absent/python3", "/bin/false")
    assert (without.returncode, without.stdout) == (1, "")
    assert without.stderr == f"{agent.NO_PYTHON}\n"


def test_the_plan_uses_the_staged_version_or_else_the_current_one(base: Path) -> None:
    assert plan(base, "2-b") == []
    staged(base, "1-a")
    sh(agent._SWITCH, base, "1-a", "")
    staged(base, "2-b")
    for version in ("1-a", "2-b"):
        (base / "versions" / version / "__main__.py").write_text(PLANNER)
    fact = node_spec.NodePlan().process(plan(base, "2-b"))
    assert fact == node_spec.Plan("2-b", (), ("the spec",))
    sh('rm -r "$1"', base / "versions" / "2-b")
    assert node_spec.NodePlan().process(plan(base, "2-b")) == node_spec.Plan("1-a", (), ("the spec",))


def test_an_agent_that_cannot_plan_is_quoted(base: Path) -> None:
    staged(base, "1-a")
    (base / "versions" / "1-a" / "__main__.py").write_text("raise RuntimeError('no netlink')\n")
    fact = node_spec.NodePlan().process(plan(base, "1-a"))
    assert fact is not None
    assert fact.errors[0].startswith("agent 1-a could not plan (exit code 1): Traceback")
    assert fact.errors[0].endswith("RuntimeError: no netlink")


def program(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("version", "managers"),
    [
        ("systemd 252 (252.39-1~deb12u2)", ["NetworkManager", "systemd-networkd"]),
        ("systemd 244.3", ["NetworkManager", "systemd-networkd"]),
        ("systemd 239 (239-82.el8)", ["NetworkManager"]),
    ],
)
def test_network_managers_that_can_ignore_vfs_are_found(tmp_path: Path, version: str, managers: list[str]) -> None:
    assert sh(network_managers._MANAGERS, tmp_path) == []
    program(tmp_path / "usr/sbin/NetworkManager")
    program(tmp_path / "usr/lib/systemd/systemd-networkd")
    program(tmp_path / "bin/systemctl", f"echo '{version}'; echo +PAM")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert sh(network_managers._MANAGERS, tmp_path, PATH=path) == managers


def test_vfs_that_udev_has_not_marked_are_found(tmp_path: Path) -> None:
    assert sh(network_managers._UNMARKED, tmp_path) == []
    marks = {"pf0": None, "pf0v0": "E:TRACKBED_VF=1\nV:1\n", "pf0v1": "E:ID_NET_NAME=pf0v1\n", "pf0v2": None}
    (tmp_path / "run/udev/data").mkdir(parents=True)
    for index, (name, mark) in enumerate(marks.items()):
        folder = tmp_path / "sys/class/net" / name
        (folder / "device").mkdir(parents=True)
        (folder / "ifindex").write_text(f"{index}\n")
        if name != "pf0":
            (folder / "device/physfn").mkdir()
        if mark:
            (tmp_path / f"run/udev/data/n{index}").write_text(mark)
    assert sh(network_managers._UNMARKED, tmp_path) == ["pf0v1", "pf0v2"]


def test_irqbalance_bans_listed_functions_and_their_vfs(tmp_path: Path) -> None:
    listed, other, vf, unlisted = "0000:21:00.0", "0000:21:00.1", "0000:21:10.0", "0000:41:00.0"
    text = irqbalance.SCRIPT_SOURCE.read_text().replace(LIST, str(tmp_path / "list"))
    assert str(tmp_path) in text
    for function in (listed, other, vf, unlisted):
        (tmp_path / function).mkdir()
    (tmp_path / vf / "physfn").symlink_to(f"../{listed}")

    def bans(function: str) -> list[str]:
        return sh(text, tmp_path / function, 47)

    assert bans(listed) == []
    (tmp_path / "list").write_text(f"{listed}\n{unlisted.replace('41', '42')}\n")
    assert bans(listed) == bans(vf) == ["ban=true"]
    assert bans(other) == bans(unlisted) == []


def requests(folder: Path) -> reboot.RebootRequests:
    return reboot.NodeRebootRequests().process(sh(reboot._REQUESTS, folder))


def test_reboot_requests_are_written_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "reboots"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert requests(folder) == reboot.RebootRequests(boot_id)
    sh(reboot._REQUEST, folder, "boot", "an old one")
    sh(reboot._REQUEST, folder, "boot", 'it\'s `a` "new" $one')
    sh(reboot._REQUEST, folder, "ofed", "another")
    assert sorted(path.name for path in folder.iterdir()) == ["boot", "ofed"]
    made = (
        reboot.RebootRequest("boot", boot_id, 'it\'s `a` "new" $one'),
        reboot.RebootRequest("ofed", boot_id, "another"),
    )
    assert requests(folder) == reboot.RebootRequests(boot_id, made)


def arguments(root: Path, path: str) -> boot.Arguments:
    message = sh(boot._ARGUMENTS, root / "drop-in.cfg", root / "state", root, root / "pending", PATH=path)
    return boot.KernelArguments().process(message)


def test_another_apt_is_waited_for(tmp_path: Path) -> None:
    text = f'{packages.APT}apt_update\napt_install install -- "$@"'
    held, log = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 612 (apt-get)", tmp_path / "log"
    program(tmp_path / "bin/sleep", f"echo slept >> {log}")
    program(
        tmp_path / "bin/apt-get",
        f'echo "$*" >> {log}; if [ $(grep -c update {log}) -lt 3 ] && [ "$2" = update ]; then echo "{held}" >&2; exit 100; fi',
    )
    sh(text, "jq", "kmod", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    *before, last = log.read_text().splitlines()
    assert before == ["-q update", "slept", "-q update", "slept", "-q update"]
    assert last.startswith("-q -y -o DPkg::Lock::Timeout=300 ")
    assert last.endswith(" --no-install-recommends install -- jq kmod")


def test_other_errors_of_apt_end_it_at_once(tmp_path: Path) -> None:
    program(tmp_path / "bin/sleep", f"touch {tmp_path}/slept")
    program(tmp_path / "bin/apt-get", "echo 'E: The repository is not signed.' >&2; exit 100")
    with pytest.raises(AssertionError, match=r"E: The repository is not signed\."):
        sh(f"{packages.APT}apt_update", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert not (tmp_path / "slept").exists()


WRITTEN, FUTURE = 1700000000, 4000000000


@pytest.mark.parametrize(
    ("started", "written", "stale"),
    [
        ("Tue 2023-11-14 22:13:20 UTC", WRITTEN, False),
        ("Tue 2023-11-14 22:13:19 UTC", WRITTEN, True),
        ("", WRITTEN, False),
        # A restart would not change this, so each deploy would do one.
        ("Tue 2023-11-14 22:13:20 UTC", FUTURE, False),
    ],
    ids=["after its file", "before its file", "never", "a clock that was set back"],
)
def test_a_service_that_started_before_its_unit_file_was_written_is_found(
    tmp_path: Path, started: str, written: int, stale: bool
) -> None:
    """Also if a daemon-reload has come in between, after which systemd shows NeedDaemonReload=no."""
    unit = tmp_path / "trackbed.service"
    unit.write_text("[Unit]\n")
    os.utime(unit, (written, written))
    program(
        tmp_path / "bin/systemctl",
        f"""case "$2" in
            *=ActiveState*) printf '%s\\n' ActiveState=active UnitFileState=enabled NeedDaemonReload=no ;;
            *=FragmentPath) echo {unit} ;;
            *=ExecMainStartTimestamp | *=ActiveEnterTimestamp) echo "{started}" ;;
            *=MainPID) echo 0 ;;
        esac""",
    )
    lines = sh(agent._SERVICE, "trackbed.service", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert agent.AgentService().process(lines) == agent.Service(active=True, enabled=True, stale=stale)
    timer = shlex.split(str(pull.TimerState().command()))
    done = subprocess.run(
        timer,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
    )
    state = pull.TimerState().process(done.stdout.splitlines())
    assert state["NeedDaemonReload"] == ("yes" if stale else "no")


@pytest.mark.parametrize(("age", "stale"), [(200, False), (50, True)], ids=["before the start", "after the start"])
def test_a_clock_that_was_set_after_the_start_of_a_service_makes_its_file_no_newer(
    tmp_path: Path, age: int, stale: bool
) -> None:
    """systemd shows the start by the clock of that moment: here years too early, as in a boot without a real-time clock."""
    unit = tmp_path / "trackbed.service"
    unit.write_text("[Unit]\n")
    written = int(time.time()) - age
    os.utime(unit, (written, written))
    since_boot = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 100) * 1_000_000)
    program(
        tmp_path / "bin/systemctl",
        f"""case "$2" in
            *=ActiveState*) printf '%s\\n' ActiveState=active UnitFileState=enabled NeedDaemonReload=no ;;
            *=FragmentPath) echo {unit} ;;
            *=ExecMainStartTimestamp) echo "Sat 2000-01-01 00:00:07 UTC" ;;
            *=ExecMainStartTimestampMonotonic) echo {since_boot} ;;
            *=MainPID) echo 0 ;;
        esac""",
    )
    lines = sh(agent._SERVICE, "trackbed.service", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert agent.AgentService().process(lines).stale == stale


@pytest.mark.parametrize(
    ("observed", "left"), [(None, "verified"), ("observed", "observed")], ids=["enforce", "observe"]
)
def test_a_new_version_that_does_not_start_goes_with_its_spec(
    base: Path, tmp_path: Path, observed: str | None, left: str
) -> None:
    staged(base, "old", "new")
    (base / "current").symlink_to("versions/new")
    (base / "previous").symlink_to("versions/old")
    spec = tmp_path / "node.json"
    for path, text in ((spec, "newest"), (tmp_path / "verified", "verified"), (tmp_path / "observed", observed)):
        if text is not None:
            path.write_text(text)
    program(tmp_path / "bin/systemctl", f'test "$(readlink {base}/current)" = versions/old')
    program(tmp_path / "bin/journalctl", "")
    trial = (agent._TRIAL, "sh", "unit", "trackbed", "1", base, spec, tmp_path / "verified", tmp_path / "observed")
    done = subprocess.run(
        ["sh", "-ec", *map(str, trial)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
    )
    assert (done.returncode, done.stderr, str((base / "current").readlink())) == (1, "", "versions/old")
    assert spec.read_text() == left


def test_grubs_kernel_arguments_are_read(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro quiet\n")
    path = os.environ["PATH"]
    if not any(Path(folder, name).exists() for folder in path.split(":") for name in ("update-grub", "grubby")):
        assert arguments(tmp_path, path) == boot.Arguments(running="BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro quiet")
    program(tmp_path / "bin" / "update-grub", "echo made")
    path = f"{tmp_path}/bin:{path}"
    # No menu was ever written.
    assert (arguments(tmp_path, path).loader, arguments(tmp_path, path).next) == ("grub", "")
    (tmp_path / "boot/grub").mkdir(parents=True)
    (tmp_path / "boot/grub/grub.cfg").write_text(
        "menuentry {\n\tlinux\t/boot/vmlinuz root=/dev/sda1 ro quiet iommu=pt pci=realloc\n}\n\tlinux /boot/vmlinuz single\n"
    )
    pending = tmp_path / "pending"
    sh(boot._GRUB, tmp_path / "drop-in.cfg", "iommu=pt pci=realloc", "# ours", pending, tmp_path, PATH=path)
    assert not pending.exists()
    assert (tmp_path / "drop-in.cfg").read_text() == (
        '# ours\nGRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT iommu=pt pci=realloc"\n'
    )
    made = arguments(tmp_path, path)
    assert (made.loader, made.next, made.ours, made.pending) == (
        "grub", "root=/dev/sda1 ro quiet iommu=pt pci=realloc", "iommu=pt pci=realloc", "",
    )  # fmt: skip
    with pytest.raises(
        AssertionError, match=r"GRUB did not set the kernel argument mmu=on: the next boot has root=.*; a file"
    ):
        sh(boot._GRUB, tmp_path / "drop-in.cfg", "iommu=pt mmu=on", "# ours", pending, tmp_path, PATH=path)
    program(tmp_path / "bin/update-grub", "echo 'no space'; exit 1")
    with pytest.raises(AssertionError, match="no space"):
        sh(boot._GRUB, tmp_path / "drop-in.cfg", "", "# ours", pending, tmp_path, PATH=path)
    assert not (tmp_path / "drop-in.cfg").exists()
    # The menu still has them, and nothing but this tells the next deploy.
    assert (arguments(tmp_path, path).ours, arguments(tmp_path, path).pending) == ("", "yes")


def test_grub_gets_a_semicolon_in_quotation_marks(tmp_path: Path) -> None:
    """Without them it ends the command: grub-script-check refuses `linux /vmlinuz a=1;fi`, and takes `'a=1;fi'`."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("ro\n")
    drop_in, menu = tmp_path / "drop-in.cfg", tmp_path / "boot/grub/grub.cfg"
    menu.parent.mkdir(parents=True)
    # As grub-mkconfig does: it sources the drop-in, and 10_linux writes the arguments as they are.
    made = """printf '\\tlinux\\t/boot/vmlinuz ro %s\\n' "$GRUB_CMDLINE_LINUX_DEFAULT" >"""
    program(tmp_path / "bin/update-grub", f"GRUB_CMDLINE_LINUX_DEFAULT=quiet; . {drop_in}; {made} {menu}")
    path, wanted = (
        f"{tmp_path}/bin:{os.environ['PATH']}",
        "iommu=pt pci=disable_acs_redir=0000:18:00.0;0000:3b:00.0 a=1",
    )
    sh(boot._GRUB, drop_in, wanted, "# ours", tmp_path / "pending", tmp_path, PATH=path)
    quoted = "iommu=pt 'pci=disable_acs_redir=0000:18:00.0;0000:3b:00.0' a=1"
    assert menu.read_text() == f"\tlinux\t/boot/vmlinuz ro quiet {quoted}\n"
    assert (arguments(tmp_path, path).next, arguments(tmp_path, path).ours) == (f"ro quiet {wanted}", wanted)
    menu.write_text(f'\tlinux\t/boot/vmlinuz ro "b=1;2" {wanted}\n')
    assert arguments(tmp_path, path).next == 'ro "b=1;2" iommu=pt pci=disable_acs_redir=0000:18:00.0'


def test_grubbys_kernel_arguments_are_read(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("root=/dev/sda1 ro\n")
    program(
        tmp_path / "bin" / "grubby",
        f'if [ "$1" = --info=DEFAULT ]; then echo \'args="ro quiet iommu=pt"\'; else echo "$*" >> {tmp_path}/did; fi',
    )
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    sh(boot._GRUBBY, tmp_path / "state", "iommu=pt", "pci=realloc isolcpus=1", PATH=path)
    assert (tmp_path / "did").read_text().splitlines() == [
        "--update-kernel=ALL --remove-args=pci=realloc isolcpus=1",
        "--update-kernel=ALL --args=iommu=pt",
    ]
    made = arguments(tmp_path, path)
    assert made == boot.Arguments("grubby", "root=/dev/sda1 ro", "ro quiet iommu=pt", "iommu=pt")
    # As one that takes a name's end for the name.
    program(tmp_path / "bin/killed/grubby", "kill -9 $PPID")
    with pytest.raises(AssertionError):
        sh(boot._GRUBBY, tmp_path / "state", "iommu=pt mmu=on", "pci=realloc", PATH=f"{tmp_path}/bin/killed:{path}")
    assert (tmp_path / "state").read_text() == "iommu=pt mmu=on pci=realloc\n"
    with pytest.raises(
        AssertionError, match="grubby did not set the kernel argument mmu=on: the next boot has ro quiet iommu=pt;"
    ):
        sh(boot._GRUBBY, tmp_path / "state", "iommu=pt mmu=on", "", PATH=path)


def initramfs(root: Path) -> tuple[str, str] | None:
    message = sh(boot._INITRAMFS, root / "modprobe.d/trackbed.conf", root / "state", root)
    return boot.Initramfs().process(message)


def test_a_deploy_that_is_killed_after_it_has_made_the_initramfs_has_requested_the_reboot(tmp_path: Path) -> None:
    """The next one finds an image that is newer than the options, and so requests nothing."""
    image, options = tmp_path / "image", tmp_path / "options"
    image.touch()
    os.utime(image, (1, 1))
    options.write_text("options ib-core netns_mode=N\n")
    program(tmp_path / "bin" / "lsinitramfs", "echo kernel/drivers/infiniband/core/ib_core.ko.xz")
    program(tmp_path / "bin" / "update-initramfs", f'touch {image}; kill -9 "$PPID"')
    given = (options, tmp_path / "state", image, tmp_path / "reboots", "initramfs", "options have changed", "ib-core")
    with pytest.raises(AssertionError):
        sh(boot._UPDATE_INITRAMFS, *given, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert image.stat().st_mtime > options.stat().st_mtime - 1
    assert (tmp_path / "reboots/initramfs").read_text().splitlines()[1:] == ["options have changed"]


def test_an_initramfs_is_made_again_if_it_has_the_module(tmp_path: Path) -> None:
    assert initramfs(tmp_path) is None
    image = tmp_path / "boot" / f"initrd.img-{os.uname().release}"
    image.parent.mkdir()
    image.write_text("one")
    os.utime(image, (1, 1))
    options = tmp_path / "modprobe.d/trackbed.conf"
    options.parent.mkdir()
    options.write_text("options erdma compat_mode=Y\n")
    program(tmp_path / "bin" / "lsinitramfs", "echo usr/lib/modules/6.1/kernel/drivers/infiniband/core/ib_core.ko.xz")
    program(tmp_path / "bin" / "update-initramfs", f"echo again >> {image}")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"

    def look(*modules: str) -> None:
        given = (options, tmp_path / "state", image, tmp_path / "reboots", "initramfs", "options have changed")
        sh(boot._UPDATE_INITRAMFS, *given, *modules, PATH=path)
        have = initramfs(tmp_path)
        assert have is not None
        assert have[0] == have[1]

    look("erdma")
    assert image.read_text() == "one"
    assert not (tmp_path / "reboots").exists()
    options.write_text("options ib-core netns_mode=N\n")
    have = initramfs(tmp_path)
    assert have is not None
    assert have[0] != have[1]
    look("ib-core")
    assert image.read_text() == "oneagain\n"
    assert (tmp_path / "reboots/initramfs").read_text().splitlines()[1:] == ["options have changed"]
    # It is newer than the options now.
    look("ib-core")
    assert image.read_text() == "oneagain\n"
