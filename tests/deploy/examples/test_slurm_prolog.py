"""The Slurm prolog of examples/: which jobs it lets through, and its message to Slurm for the others.

`scontrol` is always a stand-in, which records its arguments. `trackbed` is that of the node's archive in the test of a node
that is not ready, since the host of the tests is no node. In the others it is a stand-in that ends as docs/cli.md says.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import frozen

from tests.stand_ins import program

ROOT = Path(__file__).parents[3]
PROLOG = ROOT / "examples" / "slurm" / "prolog.sh"

# Debian's sh is dash, that of the RHEL family is bash.
SHELLS = {
    path.name for shell in ("sh", "dash", "bash") if (path := Path(shutil.which(shell) or "").resolve()).is_file()
}


@frozen
class Refusal:
    """How the prolog ended: its exit code, what it printed, and the arguments of each call of scontrol."""

    code: int
    said: str
    drained: list[list[str]]


@frozen
class Slurmd:
    """Starts the prolog as slurmd does: with its own few variables. ``bin`` is a folder for programs."""

    bin: Path
    shell: str

    def provide(self, name: str, script: str) -> None:
        """Make a program."""
        program(self.bin / name, script)

    def run(self, prolog: Path = PROLOG, **variables: str) -> Refusal:
        """Run the prolog to its end."""
        calls = self.bin / "calls"
        self.provide("scontrol", f'printf "%s\\0" "$@" >> {calls}; echo >> {calls}')
        done = subprocess.run(
            [self.shell, str(prolog)],
            env={"PATH": f"{self.bin}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "gpu-01", **variables},
            cwd=self.bin,
            capture_output=True,
            text=True,
            check=False,
        )
        drained = [line.split("\0")[:-1] for line in calls.read_text().splitlines()] if calls.exists() else []
        return Refusal(done.returncode, done.stdout + done.stderr, drained)


@pytest.fixture(params=sorted(SHELLS))
def slurmd(request: pytest.FixtureRequest, tmp_path: Path) -> Slurmd:
    return Slurmd(tmp_path, request.param)


def reason(refusal: Refusal) -> str:
    """The reason with which the node was drained, where nothing else was asked of Slurm."""
    ((*command, given),) = refusal.drained
    assert command == ["update", "NodeName=gpu-01", "State=DRAIN"]
    assert given.startswith("Reason=trackbed: ")
    text = given.removeprefix("Reason=trackbed: ")
    assert (refusal.code, refusal.said) == (1, f"node gpu-01 is refused: {text}\n")
    return text


def test_a_ready_node_takes_the_job_and_slurm_hears_nothing(slurmd: Slurmd) -> None:
    slurmd.provide("trackbed", 'test "$*" = "wait --timeout 3"')
    assert slurmd.run() == Refusal(0, "", [])


def test_a_node_that_is_not_ready_is_drained_with_the_agent_s_reason(slurmd: Slurmd, unpacked: Path) -> None:
    slurmd.provide("trackbed", f'exec {shlex.join([sys.executable, "-I", str(unpacked)])} "$@"')
    text = reason(slurmd.run())
    assert text.startswith("not ready after 3 s; /run/trackbed/report.json ")


def test_without_the_command_the_node_is_refused(slurmd: Slurmd) -> None:
    assert "trackbed is not installed" in reason(slurmd.run())


def test_a_command_that_hangs_and_ignores_sigterm_is_killed(slurmd: Slurmd, tmp_path: Path) -> None:
    # It ends at last, so that without a limit this test fails, and does not hang.
    slurmd.provide("trackbed", "trap '' TERM; for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; done; echo > lived")
    shorter = tmp_path / "prolog.sh"
    text, replaced = re.subn(r"^limit=\d+$", "limit=1", PROLOG.read_text(), flags=re.MULTILINE)
    assert replaced == 1
    shorter.write_text(text)
    assert "trackbed did not answer within 1 s" in reason(slurmd.run(shorter))
    assert not (tmp_path / "lived").exists()


def test_a_scontrol_that_fails_does_not_let_the_job_through(slurmd: Slurmd, tmp_path: Path) -> None:
    slurmd.provide("trackbed", "exit 1")
    (tmp_path / "calls").mkdir()
    done = subprocess.run(
        [slurmd.shell, str(PROLOG)],
        env={"PATH": f"{slurmd.bin}:/usr/bin:/bin", "SLURMD_NODENAME": "gpu-01"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "trackbed wait ended with status 1" in done.stderr) == (1, True)


def test_no_shell_reads_what_the_agent_says(slurmd: Slurmd, tmp_path: Path) -> None:
    slurmd.provide(
        "trackbed",
        "printf '%s\\n' 'trackbed: not ready after 3 s' '$(touch a); `touch b`; \"touch\" c%s' '* \\\\n' >&2; exit 1",
    )
    assert reason(slurmd.run()) == 'not ready after 3 s; $(touch a); `touch b`; "touch" c%s; * \\\\n'
    assert {path.name for path in tmp_path.iterdir()} == {"trackbed", "scontrol", "calls"}


def test_the_reason_is_cut_and_has_no_control_characters(slurmd: Slurmd) -> None:
    slurmd.provide("trackbed", "printf 'not\\033[31m ready\\007%0500d' 0; exit 1")
    text = reason(slurmd.run())
    assert text.startswith("not[31m ready000")
    assert len(text) == 300


def test_outside_of_slurmd_the_prolog_fails_and_says_why(slurmd: Slurmd) -> None:
    slurmd.provide("trackbed", "exit 0")
    done = subprocess.run(
        [slurmd.shell, str(PROLOG)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "SLURMD_NODENAME: is not set" in done.stderr


def test_the_exit_codes_of_the_stand_in_are_those_of_the_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    (row,) = re.findall(r"^\| `wait .*\| (.*) \|$", page, re.MULTILINE)
    assert row == "0 ready, 1 not in time"


def test_the_prolog_is_executable() -> None:
    assert PROLOG.stat().st_mode & 0o111 == 0o111
