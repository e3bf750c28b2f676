"""Public reports of another rpm that is at work: real dnf and rpm in a folder, and dnf5 by what it prints."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.rpm import Rpm
from tasks.common.commands import script
from tasks.packages import DNF, dnf_install, vendor_repository
from tasks.packages.vendor_repository import Repository
from tests.deploy.drivers.test_going_back_dnf import Node, repository
from tests.deploy.scripts import ran, sh
from tests.stand_ins import program

HERE = pytest.mark.skipif(
    not all(map(shutil.which, ("dnf", "rpmbuild", "createrepo_c"))), reason="a node's script for dnf"
)
HOLD = """
import fcntl, sys
file = open(sys.argv[1], 'r+')
fcntl.lockf(file, fcntl.LOCK_EX)
print('held', flush=True)
sys.stdin.read()
"""


@HERE
def test_an_installation_waits_for_another_rpm(tmp_path: Path) -> None:
    made = {"base": repository(tmp_path / "base", [Rpm("dash", "1-1", provides=("/bin/sh",)), Rpm("jq", "1.6-2")])}
    node = Node(tmp_path, made)
    node.install("dash")
    [lock] = (tmp_path / "node").rglob(".rpm.lock")
    with subprocess.Popen([sys.executable, "-c", HOLD, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        # The other rpm ends while the deploy waits.
        program(tmp_path / "bin/sleep", f"kill {holder.pid}")
        holder.stdout.close()
        node.install("jq")
    assert node.has() == {"jq-1.6-2"}


@HERE
@pytest.mark.parametrize(
    ("line", "package"),
    [
        pytest.param("exclude=kernel*", "kernel-devel", id="linux-tkg-74"),
        pytest.param("excludepkgs = nvidia-*, kernel*", "kernel-devel", id="nvidia-auto-installer-99"),
        ("includepkgs=jq", "kernel-devel"),
    ],
)
def test_where_dnf_leaves_packages_out_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, package: str
) -> None:
    made = {"base": repository(tmp_path / "base", [Rpm("dash", "1-1", provides=("/bin/sh",)), Rpm(package, "5.14-1")])}
    node = Node(tmp_path, made)
    node.install("dash")
    file = tmp_path / "repos/base.repo"
    file.write_text(f"{file.read_text()}{line}\n")
    monkeypatch.setenv("DNF_REPOSITORIES", str(file.parent))
    with pytest.raises(AssertionError, match=f"{file} leaves packages out"):
        node.install(f"{package}-5.14-1")


DNF5 = """
[ -e {free} ] && exit
echo 'Transaction failed: Failed to obtain rpm transaction lock. Another transaction is in progress.' >&2
exit 1
"""


def test_dnf5_that_does_not_wait_is_run_again(tmp_path: Path) -> None:
    program(tmp_path / "bin/dnf", DNF5.format(free=tmp_path / "free"))
    program(tmp_path / "bin/sleep", f"touch {tmp_path}/free")
    assert sh(f"{DNF}dnf install -y jq", programs=tmp_path / "bin") == []
    assert (tmp_path / "free").exists()


RPM_LOCKED = "can't create transaction lock on /usr/lib/sysimage/rpm/.rpm.lock (Resource temporarily unavailable)"


@pytest.mark.parametrize(
    ("log", "waits"), [(f"ERROR [rpm] {RPM_LOCKED}\n", True), (f"ERROR [rpm] {RPM_LOCKED}\nINFO other\n", False)]
)
def test_dnf5_says_only_in_its_log_that_rpm_itself_is_at_work(tmp_path: Path, log: str, waits: bool) -> None:
    (tmp_path / "log").write_text(log)
    program(tmp_path / "bin/dnf", f"[ -e {tmp_path}/free ] || {{ echo 'Rpm transaction failed.' >&2; exit 1; }}")
    program(tmp_path / "bin/sleep", f"touch {tmp_path}/free")
    done = ran(script(f"{DNF}dnf install -y jq"), tmp_path / "bin", DNF5_LOG=str(tmp_path / "log"))
    assert (done.returncode == 0) is waits


# As dnf 4 of RHEL 9 prints it, in short.
CHANGING = """\
Errors during downloading metadata for repository 'cuda':
  - Status code: 404 for https://repo.example.net/rhel9/x86_64/repodata/15616d4920f279828bc0-primary.xml.gz (IP: 192.0.2.9)"""
GONE = """\
Errors during downloading metadata for repository 'cuda':
  - Status code: 404 for https://repo.example.net/rhel9.0/x86_64/repodata/repomd.xml (IP: 192.0.2.9)"""


@pytest.mark.parametrize(
    ("said", "code", "waits"),
    [
        pytest.param(CHANGING, 1, True, id="notebooks-1188"),
        pytest.param(GONE, 1, False, id="libnvidia-container-203"),
        pytest.param(CHANGING, 0, False, id="what is wanted is in another one"),
    ],
)
def test_a_repository_that_changes_just_then_is_asked_again(tmp_path: Path, said: str, code: int, waits: bool) -> None:
    program(tmp_path / "bin/dnf", f"[ -e {tmp_path}/free ] || {{ cat >&2 <<'END'\n{said}\nEND\nexit {code}; }}")
    program(tmp_path / "bin/sleep", f"touch {tmp_path}/free")
    done = ran(script(f"{DNF}dnf install -y jq"), tmp_path / "bin")
    assert ((tmp_path / "free").exists(), done.returncode) == (waits, 0 if waits else code)


MOVED = "[MIRROR] kernel-devel-5.14.0-474.el9.rpm: Status code: 404 for https://repo.example.net/kernel-devel-5.14.0-474.el9.rpm"
NEWER = "No match for argument: kernel-devel-5.14.0-480.el9\nError: Unable to find a match: kernel-devel-5.14.0-480.el9"


@pytest.mark.parametrize(
    "said", [pytest.param(MOVED, id="dnf-plugin-system-upgrade-50"), pytest.param(NEWER, id="rocky-tools-217")]
)
def test_an_index_that_dnf_has_kept_is_not_the_one_that_counts(tmp_path: Path, said: str) -> None:
    program(tmp_path / "bin/dnf", f"case $* in *' --refresh '*) ;; *) cat >&2 <<'END'\n{said}\nEND\nexit 1 ;; esac")
    done = ran(dnf_install("kernel-devel"), tmp_path / "bin")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_vendor_s_repository_that_does_not_answer_keeps_no_other_one_away() -> None:
    given = Repository("http://repo.example.net/doca", "http://repo.example.net/key", "A" * 40)
    assert "\nskip_if_unavailable=1\n" in vendor_repository.source("doca", given, "rhel")[1]


# As rpm of RHEL 10 and of RHEL 9, and dnf, print it.
SEQUOIA = """\
error: Certificate 824612E20ACF951B:
  Policy rejects 824612E20ACF951B: No binding signature at time 2026-06-13T16:28:45Z
error: key 1 import failed."""
OPENSSL = "warning: Signature not supported. Hash algorithm SHA1 not available.\nerror: key 2 import failed."
RESIGNED = "Import of key(s) didn't help, wrong key(s)?\nPublic key for doca-ofed.rpm is not installed\nError: GPG check FAILED"


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        pytest.param(SEQUOIA, "that rpm accepts no more (SHA1)", id="lynis-1638"),
        pytest.param(
            OPENSSL,
            "remove its file on the node (gpgkey of the entry) and deploy again",
            id="rsyslog-pkg-rhel-centos-125",
        ),
        pytest.param(OPENSSL, "else use a repository with another key", id="rspamd-6183"),
        pytest.param(RESIGNED, "give the repository's key and fingerprint anew", id="cuda-quantum-5456"),
        pytest.param(RESIGNED, "are signed with another key", id="nvidia-docker-1417"),
    ],
)
def test_a_key_that_has_changed_or_is_no_more_accepted_is_explained(tmp_path: Path, said: str, remedy: str) -> None:
    (tmp_path / "said").write_text(said)
    program(tmp_path / "bin/dnf", f"cat {tmp_path}/said >&2; exit 1")
    with pytest.raises(AssertionError) as caught:
        sh(
            vendor_repository._DNF,
            "",
            "",
            "",
            "doca-ofed",
            programs=tmp_path / "bin",
            DNF_CONF="/none",
        )
    assert said.splitlines()[0] in str(caught.value)
    assert remedy in str(caught.value)
