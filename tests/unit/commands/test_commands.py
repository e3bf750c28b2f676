"""The commands on files of the test's own: what they print for people, for programs and for terminals, and their exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
from attrs import evolve

from agent import runtime
from agent.report import names, published
from agent.report.history import History
from agent.report.published import Published
from agent.report.records import Change, Condition, FunctionFault, NicVerdict, Outcome, Result, VfVerdict, to_plain
from cli.commands import Commands
from tests.programs import failure, success
from tests.unit.commands.node_folder import CONDITIONS, OUTCOME, ROOT, command, on_a_terminal, report, spec, trackbed

pytestmark = pytest.mark.slow
COMMANDS = Commands().list_commands(None)  # type: ignore[arg-type]  # it looks at no context


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "worker"])
def test_every_command_has_help_with_its_exit_codes_and_an_example(name: str, tmp_path: Path) -> None:
    helped = success(trackbed(tmp_path, name, "--help"))
    assert "Exit code: 0" in helped
    assert "Example: " in helped
    assert name in ("run", "init", "reporter") or "--json" in helped


def test_status_is_0_only_for_a_fresh_report_of_this_boot(tmp_path: Path) -> None:
    report(tmp_path)
    assert trackbed(tmp_path, "status").returncode == 0
    for different, reason in (
        ({"boot_id": "another"}, "of an earlier boot"),
        ({"uptime": runtime.uptime() - 100}, "heartbeat is 1"),
    ):
        report(tmp_path, **different)
        assert reason in failure(trackbed(tmp_path, "status"))


def test_status_shows_each_nic_and_the_vfs_that_differ(tmp_path: Path) -> None:
    since = runtime.uptime() - 7510
    faulty = (VfVerdict(1, "NoCarrier", "enp33s0v1 has no carrier", since=since),)
    vfs = ("0000:21:10.0", "0000:21:10.4")
    report(
        tmp_path,
        nics=(
            NicVerdict("rail0", "0000:21:00.0", True, True, since=since, vfs=vfs, faulty_vfs=faulty),
            NicVerdict("rail10", "", False, False, "NicMissing", "NIC rail10 is not there", since=since),
        ),
    )
    lines = trackbed(tmp_path, "status", "--devices").stdout.splitlines()
    assert lines[0] == "n1 is ready, with 1 warning"
    assert lines[-5:] == [
        "  rail0   0000:21:00.0  ready for 2h5m, 1 of 2 VFs ready",
        "    VF 1 0000:21:10.4  not ready for 2h5m (NoCarrier)",
        "      enp33s0v1 has no carrier",
        "  rail10  -             not ready for 2h5m (NicMissing), no VFs",
        "      NIC rail10 is not there",
    ]


def test_status_of_one_nic_says_why_it_is_not_as_its_spec(tmp_path: Path) -> None:
    waits = evolve(OUTCOME, result="deferred", error="it would disturb pod team/a")
    nics = (
        NicVerdict("rail0", "0000:21:00.0", True, True, vfs=("0000:21:10.0",)),
        NicVerdict("rail1", "0000:41:00.0", True, True),
    )
    report(tmp_path, ready=False, nics=nics, outcomes=(waits,))
    assert trackbed(tmp_path, "status", "--device", "rail1").returncode == 0
    for device in ("rail0", "0000:21:00.0", "0000:21:10.0"):
        shown = trackbed(tmp_path, "status", "--device", device, "--json")
        document = json.loads(shown.stdout)
        assert (shown.returncode, document["nic"]["name"]) == (1, "rail0")
        assert document["faults"] == [f"{waits.change}: {waits.error}"]
    report(tmp_path, nics=nics, uptime=runtime.uptime() - 60)
    assert "heartbeat" in trackbed(tmp_path, "status", "--device", "rail1").stdout
    assert "it has: rail0, rail1" in trackbed(tmp_path, "status", "--device", "rail2").stderr


def test_status_begins_with_readiness_number_of_warnings_and_since_when(tmp_path: Path) -> None:
    report(tmp_path, since=runtime.uptime() - 7510)
    lines = trackbed(tmp_path, "status").stdout.splitlines()
    assert lines[0] == "n1 is ready, with 1 warning"
    assert lines[1].startswith("since ")
    assert lines[1].endswith(" (2h5m)")
    dark = Condition("Carrier", "False", "NoCarrier", "dark", remedy="plug it in")
    report(tmp_path, ready=False, conditions=(*CONDITIONS, dark))
    said = trackbed(tmp_path, "status").stdout
    assert said.splitlines()[0] == "n1 is not ready: Carrier"
    # What is required comes first, and in each group what is not True.
    named = [line.split()[0] for line in said.splitlines() if line.startswith(("  ", "required", "only"))]
    assert named == ["required:", "Carrier", "Converged", "only", "Clock"]
    assert "required: 1 of 2 True" in said


def test_on_a_narrow_terminal_long_texts_have_their_own_rows(tmp_path: Path) -> None:
    dark = Condition("Carrier", "False", "NoCarrier", "no carrier " * 20, remedy="plug it in " * 20)
    report(tmp_path, ready=False, refusal="because " * 30, conditions=(*CONDITIONS, dark))
    failed = evolve(OUTCOME, result="failed", error="EBUSY " * 30, remedy="see dmesg")
    History(tmp_path, "boot-1").record([failed], "h1", "start")
    for name in ("status", "history"):
        rows = on_a_terminal(tmp_path, name, COLUMNS="60", TERM="xterm", NO_COLOR="1").splitlines()
        assert max(len(row) for row in rows) <= 60
        # For programs such as grep each is one line.
        assert max(len(line) for line in trackbed(tmp_path, name).stdout.splitlines()) > 180
    assert "      do: plug it in plug it in" in on_a_terminal(
        tmp_path, "status", COLUMNS="60", TERM="xterm", NO_COLOR="1"
    )


def test_a_report_in_another_format_gives_one_message(tmp_path: Path) -> None:
    (tmp_path / names.REPORT).write_text('{"ready": 3}')
    assert "not a Report of this agent" in failure(trackbed(tmp_path, "status"))


def test_colours_are_for_terminals_alone_and_can_be_turned_off(tmp_path: Path) -> None:
    report(tmp_path)
    History(tmp_path, "boot-1").record([OUTCOME], "h1", "spec")
    spec(tmp_path, sysctls={"vm.swappiness": "101"})
    for name in ("status", "history", "plan"):
        assert "\x1b[32m" in on_a_terminal(tmp_path, name, TERM="xterm", NO_COLOR="")
        assert "\x1b" not in on_a_terminal(tmp_path, name, TERM="xterm", NO_COLOR="1")
        assert "\x1b" not in trackbed(tmp_path, name).stdout


def test_live_views_redraw_in_place_on_a_terminal(tmp_path: Path) -> None:
    report(tmp_path)
    up_and_clear = "F\x1b[?7l"
    assert up_and_clear in on_a_terminal(tmp_path, "status", "--watch", until=up_and_clear, TERM="xterm")
    drawn = on_a_terminal(tmp_path, "stat", "-d", "lo", "-l", "--interval", "0.1", until=up_and_clear, TERM="xterm")
    assert "elapsed " in drawn.rpartition(up_and_clear)[2]
    plain = on_a_terminal(tmp_path, "stat", "-d", "lo", "-l", "--interval", "0.1", "--count", "2", TERM="dumb")
    assert "\x1b[?7l" not in plain


def test_the_age_of_a_heartbeat_does_not_jump_with_the_clock(tmp_path: Path) -> None:
    report(tmp_path, heartbeat=time.time() - 365 * 86400)
    shown = on_a_terminal(tmp_path, "status", "--watch", until="Ctrl-C ends", TERM="xterm")
    age = re.search(r"heartbeat +(\d+) s ago", shown)
    assert age
    assert int(age[1]) < 60


def test_on_a_terminal_a_command_that_waits_says_why(tmp_path: Path) -> None:
    dark = Condition("Carrier", "False", "NoCarrier", "no carrier " * 20)
    report(tmp_path, ready=False, conditions=(*CONDITIONS, dark, dark))
    said = on_a_terminal(tmp_path, "wait", "--timeout", "1", COLUMNS="60", TERM="xterm")
    row, _, result = said.partition("\x1b[K\r\x1b[K")
    assert row == "\rwaiting, 1 s at most: Carrier is False... (and 1 more)"
    assert result.startswith("trackbed: not ready after 1 s")
    narrow = on_a_terminal(tmp_path, "wait", "--timeout", "1", COLUMNS="12", TERM="xterm")
    assert narrow.startswith("\rwaiting, 1 \x1b[K\r\x1b[K")
    assert "trackbed: not ready after 1 s" in narrow
    assert "waiting" not in on_a_terminal(tmp_path, "wait", "--timeout", "1", TERM="dumb")
    assert "waiting" not in trackbed(tmp_path, "wait", "--timeout", "1").stderr
    spec(tmp_path, gpus={"count": 64})
    why = "\rwaiting, 60 s at most: GpusPresent is False ("
    assert why in on_a_terminal(tmp_path, "apply", "--timeout", "60", until=why, TERM="xterm")


def watched(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command(folder, "status", "--watch", *arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("result", "refusal", "of", "code"),
    [
        ("applied", "", "h1", 0),
        ("deferred", "", "h1", 0),
        ("blocked", "", "h1", 1),
        ("deferred", "no such NIC", "h2", 1),
    ],
)
def test_what_waits_for_users_does_not_keep_a_node_from_being_ready_with_a_spec(
    tmp_path: Path, result: Result, refusal: str, of: str, code: int
) -> None:
    why = Condition("UpToDate", "False" if result != "applied" else "True", "Deferred", "in use", severity="warn")
    waits = Outcome(OUTCOME.change, result, "in use")
    report(tmp_path, up_to_date=result == "applied", outcomes=(waits,), conditions=(why,), refusal=refusal)
    done = trackbed(tmp_path, "wait", "--hash", of, "--timeout", "0.1")
    assert (done.returncode, "in use" in done.stderr) == (code, result == "blocked")
    assert refusal in done.stderr


def test_watch_prints_a_line_for_each_change_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    report(tmp_path)
    process = watched(tmp_path)
    assert process.stdout is not None
    assert "  ready, with 1 warning  generation 0" in process.stdout.readline()
    report(tmp_path)  # a heartbeat is no change
    report(tmp_path, generation=1, ready=False, conditions=(Condition("Carrier", "False", "NoCarrier", "dark"),))
    line = process.stdout.readline()
    assert "not ready: Carrier  generation 1" in line
    assert "dark" in line
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 1


def test_watch_json_prints_a_document_for_each_change(tmp_path: Path) -> None:
    process = watched(tmp_path, "--json")
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert (first["ready"], first["report"]) == (False, None)
    report(tmp_path)
    second = json.loads(process.stdout.readline())
    assert (second["ready"], second["report"]["spec_hash"]) == (True, "h1")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0


ESCAPES = "\x1b[2J\x1b]0;mine\x07\u202e\nready"
SHOWN = "\\x1b[2J\\x1b]0;mine\\x07\\u202e\\nready"


def test_text_from_outside_is_escaped_on_the_terminal(tmp_path: Path) -> None:
    broken = Condition("Links", "False", "Down", ESCAPES)
    report(tmp_path, ready=False, node_name=ESCAPES, refusal=ESCAPES, conditions=(broken,))
    said = trackbed(tmp_path, "status")
    change = Change("sysctls", "host", "kernel.x", ESCAPES, "1")
    History(tmp_path, "boot-1").record([Outcome(change, "failed", ESCAPES, "see dmesg")], "h1", ESCAPES)
    history = trackbed(tmp_path, "history")
    for text in (said.stdout, said.stderr, history.stdout):
        assert "\x1b" not in text
        assert SHOWN in text


def test_a_character_that_the_terminals_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    report(tmp_path, refusal="\u4e2d")
    environment = {**os.environ, "PYTHONIOENCODING": "iso-8859-1"}
    shown = subprocess.run(
        command(tmp_path, "status"), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "refused    \\u4e2d\n" in shown.stdout


def test_doctor_names_a_remedy_on_a_node_without_an_agent(tmp_path: Path) -> None:
    said = trackbed(tmp_path, "doctor")
    assert said.returncode == 1
    assert f"1. problem (agent): {tmp_path}/node.json does not exist\n" in said.stdout
    assert said.stdout.count("\n   do: ") == said.stdout.count(". problem") + said.stdout.count(". warning")
    assert json.loads(trackbed(tmp_path, "doctor", "--json").stdout)["findings"][0]["stage"] == "agent"
    spec(tmp_path, node_number="x")
    assert "1. problem (agent): the spec" in trackbed(tmp_path, "doctor").stdout


@pytest.mark.parametrize(("shell", "word"), [("bash", "complete"), ("zsh", "#compdef"), ("fish", "complete")])
def test_each_shell_gets_a_script_that_completes_commands(shell: str, word: str) -> None:
    assert word in completed(f"{shell}_source")
    assert sorted(completed("bash_complete").splitlines()) == ["plain,stat", "plain,status"]


def completed(instruction: str) -> str:
    """What click answers to the variable that docs/cli.md names."""
    words = {"_TRACKBED_COMPLETE": instruction, "COMP_WORDS": "trackbed st", "COMP_CWORD": "1"}
    program = [sys.executable, "-m", "cli"]
    return subprocess.run(
        program, cwd=ROOT, env={**os.environ, **words}, capture_output=True, text=True, check=True
    ).stdout


def test_a_node_that_has_not_joined_a_cluster_is_not_waited_for(tmp_path: Path) -> None:
    joined = tmp_path / "kubelet.conf"
    gate = ("wait", "--first-pass", "--joined", str(joined), "--timeout", "0.1")
    at_once = trackbed(tmp_path, *gate)
    assert (at_once.returncode, "has not joined" in at_once.stderr) == (0, True)
    assert json.loads(success(trackbed(tmp_path, *gate, "--json")))["ready"] is None
    joined.touch()
    held = trackbed(tmp_path, *gate)
    assert (held.returncode, "no pass of this boot" in held.stderr) == (1, True)
    (tmp_path / "first-pass").write_text(f"{runtime.boot_id()}\n")
    assert trackbed(tmp_path, *gate).returncode == 0


def test_the_kubelet_starts_unverified_once_not_ready_is_published_in_this_boot(tmp_path: Path) -> None:
    gate = ("wait", "--first-pass", "--let-go", "0", "--timeout", "0.1")
    path = tmp_path / "published.json"
    assert trackbed(tmp_path, *gate).returncode == 1
    for untrue in (Published("another-boot", 3), Published(runtime.boot_id(), 3, ready=True)):
        published.write(path, untrue)
        assert trackbed(tmp_path, *gate).returncode == 1
    published.write(path, Published(runtime.boot_id(), 3))
    gone = trackbed(tmp_path, *gate)
    assert (gone.returncode, "let go unverified" in gone.stderr) == (0, True)
    for_programs = trackbed(tmp_path, *gate, "--json")
    assert (for_programs.returncode, json.loads(for_programs.stdout)["ready"]) == (0, False)
    assert trackbed(tmp_path, "wait", "--first-pass", "--let-go", "60", "--timeout", "0.1").returncode == 1
    assert trackbed(tmp_path, "wait", "--let-go", "0", "--timeout", "0.1").returncode == 1


def test_status_shows_what_is_published_in_kubernetes_and_why_the_rest_is_not(tmp_path: Path) -> None:
    report(tmp_path, uptime=runtime.uptime())
    assert "kubernetes" not in trackbed(tmp_path, "status").stdout
    (tmp_path / "reporter.json").write_text("{}")
    assert "kubernetes nothing is published yet" in trackbed(tmp_path, "status").stdout
    assert "problem (cluster): the reporter" in trackbed(tmp_path, "doctor").stdout
    published.write(tmp_path / "published.json", Published(runtime.boot_id(), 7, True, "it is away"))
    assert "kubernetes ready, generation 7; it is away" in trackbed(tmp_path, "status").stdout
    assert json.loads(trackbed(tmp_path, "status", "--json").stdout)["kubernetes"]["generation"] == 7
    waits = Published(runtime.boot_id(), 7, True, tainted_until="rdma/hca is allocatable")
    published.write(tmp_path / "published.json", waits)
    assert waits.tainted_until in trackbed(tmp_path, "status").stdout
    published.write(tmp_path / "published.json", evolve(waits, ready=False))
    assert "stays" not in trackbed(tmp_path, "status").stdout
    published.write(tmp_path / "published.json", Published("another boot", 7, True))
    assert "kubernetes nothing of this boot" in trackbed(tmp_path, "status").stdout


def documented_keys(name: str) -> set[str]:
    """The keys that docs/json.md lists for the JSON of a command."""
    [row] = [line for line in (ROOT / "docs/json.md").read_text().splitlines() if line.startswith(f"| `{name}` | ")][
        -1:
    ]
    return set(re.findall(r"`(\w+)`", row.rpartition(" | ")[2]))


@pytest.mark.parametrize(
    "name", ["status", "doctor", "plan", "wait", "history", "inspect", "topology", "stat", "stat -l", "apply"]
)
def test_the_documents_of_a_command_have_the_keys_that_the_documentation_names(name: str, tmp_path: Path) -> None:
    report(tmp_path)
    spec(tmp_path)
    History(tmp_path, "boot-1").record([OUTCOME], "h1", "spec")
    more = {
        "stat": ("-d", "lo"),
        "stat -l": ("-d", "lo", "--count", "1", "--interval", "0.1"),
        "apply": ("--timeout", "5"),
    }
    text = trackbed(tmp_path, *name.split(), *more.get(name, ()), "--json").stdout
    document = json.loads(text.splitlines()[-1])
    assert set(document[0] if isinstance(document, list) else document) == documented_keys(name)


def test_the_parts_of_a_report_have_the_keys_that_the_documentation_names(tmp_path: Path) -> None:
    report(tmp_path, outcomes=(OUTCOME,))
    shown = json.loads(trackbed(tmp_path, "status", "--json").stdout)
    text = (ROOT / "docs/json.md").read_text().partition("\nA condition has ")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", text))
    internal = {"grace_period", "skip_if_owned", "required", "original"}
    parts = (shown["conditions"][0], shown["outcomes"][0], shown["outcomes"][0]["change"])
    assert {key for part in parts for key in part} - internal == named - {*get_args(Result)}
    text = (ROOT / "docs/json.md").read_text().partition("\nA fault has ")[2].partition("\n\n")[0]
    of_nics = to_plain((FunctionFault("", "", ""), NicVerdict("", "", True, True), VfVerdict(0, "", "")))
    assert {key for part in of_nics for key in part} == {*re.findall(r"`(\w+)`", text)} - {"ADDRESS", "host", "nics"}
