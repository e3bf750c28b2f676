"""The prefetching of facts, through pyinfra's own command line and config.py. This machine is the node."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from attrs import frozen

from agent.report.records import Report, report_to_json
from tasks.common import answers, lock, prefetch
from tasks.common.answers import Answer
from tests.deploy.fake import pyinfra

FACTS = """
from pathlib import Path

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common.commands import script
from tasks.common.facts import FactBase

FOLDER = Path(__file__).parent


class Content(FactBase[str]):
    default = str

    def command(self, path: str) -> StringCommand:
        return script('cat "$1"', str(FOLDER / path))


class Now(Content):
    prefetched = False


@operation()
def note(path: str, fact: type = Content):
    content = host.get_fact(fact, path=path)
    with (FOLDER / "seen").open("a") as seen:
        seen.write(f"{path} {content!r}\\n")
    yield from ()


@operation()
def write(path: str, content: str):
    if content not in host.get_fact(Content, path=path):
        yield script('echo "$1" >> "$2"', content, str(FOLDER / path))
"""


@frozen
class Ran:
    """A run of pyinfra: what facts saw, and how many commands it sent."""

    seen: list[str]
    commands: int
    output: str
    failed: bool


@frozen
class Deploy:
    """A deploy of this machine, by code in a folder of its own."""

    folder: Path

    def write(self, code: str) -> None:
        (self.folder / "deploy.py").write_text(FACTS + code)

    def run(self, *options: str) -> Ran:
        seen = self.folder / "seen"
        seen.write_text("")
        words = ("--debug", *(options or ("-y",)), "@local", self.folder / "deploy.py")
        done = pyinfra(*words, XDG_CACHE_HOME=str(self.folder / "cache"), PYINFRA_PROGRESS="off")
        output = done.stdout + done.stderr
        # Taking and giving back the lock is not a matter of facts.
        commands = output.count("Running command on") - output.count(f"sh {lock.FILE}")
        return Ran(seen.read_text().splitlines(), commands, output, done.returncode != 0)

    def kept(self) -> Path:
        [file] = (self.folder / "cache/trackbed/facts").glob("*/*")
        return file


@pytest.fixture
def deploy(tmp_path: Path) -> Deploy:
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text(f"{name}, first line\n\nlast\n\n")
    return Deploy(tmp_path)


NOTES = """
note(path="one")
note(path="two")
note(path="three")
"""
SAW = [f"{name} '{name}, first line\\n\\nlast\\n'" for name in ("one", "two", "three")]


def test_the_second_deploy_reads_all_facts_by_one_command_and_sees_the_same(deploy: Deploy) -> None:
    deploy.write(NOTES)
    first, second = deploy.run(), deploy.run()
    assert (first.seen, first.commands) == (SAW, 3)
    assert (second.seen, second.commands) == (SAW, 1)


def test_the_first_deploy_of_a_host_reads_what_the_last_deploy_read_from_another_host(deploy: Deploy) -> None:
    deploy.write(NOTES)
    deploy.run()
    another = deploy.kept().rename(deploy.kept().with_name("another host.json"))
    first = deploy.run()
    assert (first.seen, first.commands) == (SAW, 1)
    # From then on the host has a list of its own.
    another.unlink()
    assert deploy.run().commands == 1


def test_a_dry_run_prefetches_too_and_the_deploy_after_it_reads_again(deploy: Deploy) -> None:
    deploy.write(NOTES)
    assert [deploy.run("--dry").commands for _ in range(2)] == [3, 1]
    assert [deploy.run("--yes").commands for _ in range(2)] == [3, 1]
    # The commands of both phases are kept.
    assert deploy.run("--dry").commands == 1


def test_facts_after_a_change_are_read_again(deploy: Deploy) -> None:
    deploy.write('note(path="one")\nwrite(path="two", content="changed")\nnote(path="two")\nnote(path="three")\n')
    deploy.run()
    deploy.run()
    (deploy.folder / "two").write_text("as somebody left it\n")
    changed = deploy.run()
    assert changed.seen == [SAW[0], "two 'as somebody left it\\nchanged'", SAW[2]]
    # The prefetch, the change, and each fact after it.
    assert changed.commands == 4


def test_a_fact_that_must_be_current_is_not_prefetched(deploy: Deploy) -> None:
    deploy.write(NOTES + 'note(path="one", fact=Now)\n')
    deploy.run()
    assert deploy.run().commands == 2


USERS = """
from tasks.common.systemd_reload import GpuLosers
from tasks.containers.container_engine import StoppedByRestart
from tasks.containers.engine_files import ContainersRun
from tasks.drivers.erdma import LoadedDriver
from tasks.drivers.gpu_driver.modules import GpuUsers
from tasks.drivers.ofed.users import OfedUsers
from tasks.reboot_users import RebootUsers


@operation()
def look():
    host.get_fact(GpuLosers)
    host.get_fact(StoppedByRestart, engine="docker")
    host.get_fact(ContainersRun, engine="containerd")
    host.get_fact(LoadedDriver)
    host.get_fact(GpuUsers)
    host.get_fact(OfedUsers, modules=("mlx5_core",))
    host.get_fact(RebootUsers, of="host")
    yield from ()


look()
"""


def test_who_uses_the_node_is_asked_when_it_is_disturbed(deploy: Deploy) -> None:
    """A job may begin after the deploy's other facts were read."""
    deploy.write(NOTES + USERS)
    first, second = deploy.run(), deploy.run()
    assert (first.failed, second.failed) == (False, False)
    assert (first.commands, second.commands) == (3 + 7, 1 + 7)


@pytest.mark.parametrize(("ready_s", "read"), [(prefetch.USABLE_S + 60, ["VFs"]), (5, ["VFs", "more VFs"])])
def test_what_was_read_before_a_node_became_ready_is_read_again(
    deploy: Deploy, ready_s: float, read: list[str]
) -> None:
    """The first pass of a boot makes the VFs, which labels and nccl.conf depend on."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    report = Report("a", "abc", boot_id, "1", True, True, uptime=uptime, since=uptime - ready_s)
    (deploy.folder / "report.json").write_text(report_to_json(report))
    deploy.write(
        """
from tasks import hardware
from tasks.common import status

status.NodeStatus.words = (str(FOLDER / "report.json"),)


@operation()
def finish():
    (FOLDER / "one").write_text("more VFs")
    yield from ()


note(path="two")
note(path="one")
finish()
hardware.settle(version="1", spec_hash="abc")
note(path="one")
"""
    )
    (deploy.folder / "one").write_text("VFs")
    options = "-y", "--data", "labels={}"
    deploy.run(*options)
    (deploy.folder / "one").write_text("VFs")
    seen = deploy.run(*options).seen[1:]
    assert list(dict.fromkeys(each.split("'")[1] for each in seen)) == read


def test_a_fact_that_fails_is_read_again_and_the_reason_is_printed(deploy: Deploy) -> None:
    deploy.write(NOTES)
    deploy.run()
    (deploy.folder / "two").unlink()
    failed = deploy.run()
    assert failed.failed
    assert "No such file or directory" in failed.output
    assert failed.seen == SAW[:1]
    # The failed deploy does not shorten the kept list.
    (deploy.folder / "two").write_text("two, first line\n\nlast\n\n")
    assert deploy.run().commands == 1


def test_a_fact_that_the_last_deploy_did_not_read_is_read_by_itself(deploy: Deploy) -> None:
    deploy.write('note(path="one")\nnote(path="two")\n')
    deploy.run()
    deploy.write(NOTES)
    again = deploy.run()
    assert (again.seen, again.commands) == (SAW, 2)


def test_a_fact_that_hangs_fails_the_host_by_its_own_name_after_the_limit_of_a_fact(deploy: Deploy) -> None:
    deploy.write(NOTES)
    data = "--data", 'time_limits={"fact": 1, "command": 600, "build": 600}'
    deploy.run("-y", *data)
    os.mkfifo(deploy.folder / "pipe")
    (deploy.folder / "two").unlink()
    (deploy.folder / "two").symlink_to("pipe")
    hanging = deploy.run("-y", *data)
    # Whoever still reads the pipe ends.
    os.close(os.open(deploy.folder / "pipe", os.O_RDWR))
    assert hanging.failed
    assert "no answer to Content within 1 s" in hanging.output
    # The prefetch, the first fact by itself, and the one that hangs.
    assert (hanging.seen, hanging.commands) == (SAW[:1], 3)


def test_a_long_answer_is_not_kept_in_memory(deploy: Deploy) -> None:
    (deploy.folder / "one").write_text("x" * (prefetch.LONGEST_ANSWER + 1))
    deploy.write(NOTES)
    deploy.run()
    assert deploy.run().commands == 2


def test_a_secret_in_a_command_is_not_written(deploy: Deploy) -> None:
    deploy.write(
        NOTES
        + """
from pyinfra.api import HiddenValue


class Hidden(FactBase[str]):
    def command(self) -> StringCommand:
        return StringCommand("echo", QuoteString(HiddenValue("planted")))


from pyinfra.api.command import QuoteString

host.get_fact(Hidden)
host.get_fact(Hidden)
"""
    )
    deploy.run()
    assert "planted" not in deploy.kept().read_text()
    assert deploy.kept().stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["{", "[]", '{"code": "of another version", "phases": {"execute": ["exit 1"]}}'])
def test_kept_commands_that_cannot_be_read_or_are_of_other_code_are_replaced(deploy: Deploy, damage: str) -> None:
    deploy.write(NOTES)
    deploy.run()
    deploy.kept().write_text(damage)
    assert [deploy.run().commands for _ in range(2)] == [3, 1]


def test_without_a_cache_a_deploy_reads_each_fact_by_itself(deploy: Deploy) -> None:
    deploy.write(NOTES)
    (deploy.folder / "cache").write_text("no folder")
    ran = deploy.run()
    assert (ran.seen, ran.commands, ran.failed) == (SAW, 3, False)
    assert "Traceback" not in ran.output


MARK = answers.new_mark()


@pytest.mark.parametrize("output", ["", "a", "a\n", "a\n\n", "\n", "+0", "+1\n", "a+0", " a \n\tb\\n\n", "é\n"])
def test_an_answer_is_what_the_command_alone_prints(output: str) -> None:
    command = f"printf %s {shlex.quote(output)}"
    text = prefetch.framed([command, "exit 1", command], "sh", MARK)
    printed = subprocess.run(["sh"], input=f"printf Welcome\n{text}", capture_output=True, text=True, check=True).stdout
    alone = output.removesuffix("\n").split("\n") if output else []
    lines = printed.split("\n")
    assert answers.whole(lines, MARK) == [Answer(alone, 0), Answer([], 1), Answer(alone, 0)]
    # Without the last mark, the last answer is not whole.
    assert len(answers.whole(lines[:-2], MARK)) == 2
