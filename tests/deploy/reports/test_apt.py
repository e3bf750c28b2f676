"""Public reports of apt: another one is at work, as after a server's first boot, or repositories have changed or do not answer.

apt itself answers, in folders of its own.
"""

import hashlib
import os
import re
import shutil
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from tasks import packages
from tasks.packages.vendor_repository import FETCH
from tests.deploy.scripts import sh
from tests.http_server import Request, serving
from tests.stand_ins import program

CONTROL = (
    "Package: fabric-tools\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@example.org>\nDescription: none\n"
)
ENTRY = "{}Filename: ./fabric-tools.deb\nSize: {}\nSHA256: {}\n\n"
SETTINGS = """\
Dir::Etc "{root}/etc"; Dir::Etc::sourceparts "-"; Dir::Cache "{root}/cache"; APT::Sandbox::User "";
Dir::State "{root}/state"; Dir::State::status "{root}/state/status";
"""


pytestmark = pytest.mark.skipif(
    shutil.which("dpkg-deb") is None or os.geteuid() != 0, reason="apt locks its folders only for root, and on Debian"
)
INSTALL = f'{packages.APT}apt_update\napt_install --download-only install -- "$@"'


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An apt with a repository of one package. It looks often whether the lock is free."""
    for folder in ("etc/preferences.d", "state/lists/partial", "cache/archives/partial", "repo", "package/DEBIAN"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "package/DEBIAN/control").write_text(CONTROL)
    package = tmp_path / "repo/fabric-tools.deb"
    subprocess.run(["dpkg-deb", "--build", tmp_path / "package", package], check=True, capture_output=True)
    checksum = hashlib.sha256(package.read_bytes()).hexdigest()
    (tmp_path / "repo/Packages").write_text(ENTRY.format(CONTROL, package.stat().st_size, checksum))
    (tmp_path / "etc/sources.list").write_text(f"deb [trusted=yes] file:{tmp_path}/repo ./\n")
    (tmp_path / "state/status").touch()
    (tmp_path / "apt.conf").write_text(SETTINGS.format(root=tmp_path))
    program(tmp_path / "bin/sleep", "exec /bin/sleep 0.2")
    made = {"APT_CONFIG": str(tmp_path / "apt.conf"), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    sh(f"{packages.APT}apt_update", **made)
    return made


@pytest.mark.parametrize(
    "lock",
    [
        pytest.param("cache/archives/lock", id="connectbox-pi-150"),
        pytest.param("state/lock-frontend", id="packer-ci-build-221"),
        pytest.param("state/lists/lock", id="performance-is-57"),
    ],
)
def test_an_installation_waits_for_another_apt(tmp_path: Path, environment: dict[str, str], lock: str) -> None:
    with (tmp_path / lock).open("w") as file:
        holder = subprocess.Popen(
            ["python3", "-c", "import fcntl, sys; fcntl.lockf(1, fcntl.LOCK_EX); sys.stderr.write('held'); sys.stdin.read()"],
            stdin=subprocess.PIPE, stdout=file, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert holder.stdin is not None
        assert holder.stderr is not None
        assert holder.stderr.read(4) == b"held"
        release = threading.Timer(0.5, holder.stdin.close)
        release.start()
        said = sh(INSTALL, "fabric-tools", **environment)
        release.join()
        holder.wait()
    assert any(line.startswith("Get:1 ") or "newly installed" in line for line in said)


@pytest.fixture
def silent(tmp_path: Path, environment: dict[str, str]) -> dict[str, str]:
    """Of two repositories the second one does not answer. `apt-get update` ends with 0."""
    with (tmp_path / "etc/sources.list").open("a") as file:
        file.write("deb [trusted=yes] http://127.0.0.1:9/vendor ./\n")
    with (tmp_path / "apt.conf").open("a") as file:
        file.write('Acquire::Retries "0"; Acquire::http::Proxy "false";\n')
    return environment


def test_a_repository_that_did_not_answer_is_named_if_a_package_is_missing(silent: dict[str, str]) -> None:
    with pytest.raises(
        AssertionError, match=r"Unable to locate package cuda-drivers\n[^$]*W: Failed to fetch http://127"
    ):
        sh(INSTALL, "cuda-drivers", **silent)


def test_a_repository_that_does_not_answer_keeps_no_other_one_away(silent: dict[str, str]) -> None:
    assert any(line.startswith("Get:1 ") for line in sh(INSTALL, "fabric-tools", **silent))


@pytest.mark.parametrize(
    ("more", "wanted", "said"),
    [
        pytest.param("", "cuda-drivers", "E: Unable to locate package cuda-drivers", id="cloud-init-4691"),
        pytest.param("deb file:{}/none noble main\n", "fabric-tools", "E: The repository '", id="puppetlabs-apt-1231"),
    ],
)
def test_that_sources_have_a_repository_twice_hides_no_error(
    tmp_path: Path, environment: dict[str, str], more: str, wanted: str, said: str
) -> None:
    with (tmp_path / "etc/sources.list").open("r+") as file:
        file.write(file.read() + more.format(tmp_path))
    with pytest.raises(AssertionError) as caught:
        sh(INSTALL, wanted, **environment)
    assert said in str(caught.value) and "configured multiple times" not in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(
            "cdrom:[Debian GNU/Linux 12.5.0 _Bookworm_ - Official NETINST]/ bookworm main", id="freeswitch-409"
        ),
        pytest.param("file:/nowhere/ppa noble main", id="ansible-ppa-104"),
    ],
)
def test_the_entry_of_a_repository_that_is_gone_is_to_be_removed(
    tmp_path: Path, environment: dict[str, str], entry: str
) -> None:
    with (tmp_path / "etc/sources.list").open("a") as file:
        file.write(f"deb {entry}\n")
    with pytest.raises(AssertionError, match=r"does not have a Release file.\n.*\(cdrom:\), remove its entry"):
        sh(INSTALL, "fabric-tools", **environment)


@pytest.mark.parametrize(
    ("field", "refused"),
    [
        pytest.param("Origin", True, id="nvidia-docker-1349"),
        pytest.param("Label", True, id="passenger-2560"),
        pytest.param("Suite", False, id="compute-image-tools-1721"),
    ],
)
def test_a_repository_that_says_to_be_another_is_named(
    tmp_path: Path, environment: dict[str, str], field: str, refused: bool
) -> None:
    release = tmp_path / "repo/Release"
    checksum = hashlib.sha256((tmp_path / "repo/Packages").read_bytes()).hexdigest()
    for value in ("stable", "oldstable"):
        size = (tmp_path / "repo/Packages").stat().st_size
        release.write_text(f"{field}: {value}\nSHA256:\n {checksum} {size} Packages\n")
        if value == "stable" or not refused:
            sh(f"{packages.APT}apt_update", **environment)
            continue
        with pytest.raises(AssertionError, match=f"changed its '{field}' value from .*\n.* --allow-releaseinfo-change"):
            sh(f"{packages.APT}apt_update", **environment)


FUTURE, PAST = "Fri, 01 Jan 2100 00:00:00 UTC", "Sat, 01 Jan 2000 00:00:00 UTC"
SNAPSHOT = f"Date: {PAST}\nValid-Until: {PAST}"


@pytest.mark.parametrize(
    ("dates", "remedy"),
    [
        pytest.param(f"Date: {FUTURE}", "clock may be slow: it says", id="zansin-62"),
        pytest.param(SNAPSHOT, "give its entry 'Check-Valid-Until: no'", id="debuerreotype-201"),
        pytest.param(SNAPSHOT, "clock may be fast", id="raspi3-image-spec-1"),
        pytest.param(SNAPSHOT, "a mirror that is not updated any more", id="vagrant-deb-19"),
    ],
)
def test_a_repository_whose_time_does_not_fit_the_clock_is_explained(
    tmp_path: Path, environment: dict[str, str], dates: str, remedy: str
) -> None:
    packages_file = (tmp_path / "repo/Packages").read_bytes()
    checksum = f" {hashlib.sha256(packages_file).hexdigest()} {len(packages_file)} Packages\n"
    (tmp_path / "repo/Release").write_text(f"{dates}\nSHA256:\n{checksum}")
    (tmp_path / "etc/sources.list").write_text(f"deb [trusted=yes check-valid-until=yes] file:{tmp_path}/repo ./\n")
    with pytest.raises(AssertionError, match=r"Release file for .*\(invalid (?s:.*)" + re.escape(remedy)):
        sh(f"{packages.APT}apt_update", **environment)


# As apt 3.0.4 of Debian 13 prints it.
UNBOUND = """\
Err:1 https://repo.example.net/deb  InRelease
  Sub-process /usr/bin/sqv returned an error code (1), error message is: Signing key on 67E8609C is not bound:         \
   No binding signature at time 2026-11-30T08:19:23Z   because: SHA1 is not considered secure since 2026-02-01T00:00:00Z
E: The repository 'https://repo.example.net/deb  InRelease' is not signed.
"""


def test_a_key_that_apt_accepts_no_more_is_to_be_fetched_again(tmp_path: Path) -> None:
    program(tmp_path / "bin/apt-get", f"cat <<'END'\n{UNBOUND}END\nexit 100")
    with pytest.raises(AssertionError, match=r"not signed\.\n(?s:.*)remove its file on the node \(Signed-By"):
        sh(f"{packages.APT}apt_update", programs=tmp_path / "bin")


CHANGING = """\
E: Failed to fetch https://repo.example.net/deb/Packages.gz  File has unexpected size (1410 != 1406). Mirror sync in progress?
E: Some index files failed to download. They have been ignored, or old ones used instead.
"""


@pytest.mark.parametrize("wanted", ["jq", "cuda-drivers"])
@pytest.mark.parametrize("settled_after", [1, 1000])
def test_a_repository_that_changes_just_then_is_asked_again(tmp_path: Path, wanted: str, settled_after: int) -> None:
    """If that goes on for long, what other repositories have can still be installed."""
    log = tmp_path / "log"
    program(tmp_path / "bin/sleep", f"echo slept >> {log}")
    changing = f"[ $(wc -l < {log}) -ge {settled_after} ] || {{ cat <<'END'\n{CHANGING}END\nexit 100; }}"
    program(
        tmp_path / "bin/apt-get", f"case $* in *update) {changing} ;; *cuda-drivers) echo none >&2; exit 100 ;; esac"
    )
    log.touch()
    if wanted == "jq":
        sh(INSTALL, wanted, programs=tmp_path / "bin")
    else:
        with pytest.raises(AssertionError) as caught:
            sh(INSTALL, wanted, programs=tmp_path / "bin")
        assert ("Mirror sync in progress" in str(caught.value)) == (settled_after > 1)
    assert log.read_text().split().count("slept") == min(settled_after, 59)


@pytest.mark.parametrize(
    ("added", "settled_after", "tries"),
    [
        pytest.param(b"more", 3, 3, id="cuda-repo-management-20"),
        pytest.param(b"", 1, 1, id="apt-122"),
        pytest.param(b"", 1000, 1, id="rpc-openstack-1197"),
    ],
)
def test_a_package_that_is_not_the_index_s_is_fetched_again_with_a_new_index(
    tmp_path: Path, environment: dict[str, str], added: bytes, settled_after: int, tries: int
) -> None:
    """If its owner is changing the repository, for as long as for an index; for another content of its size, once."""
    package, log = tmp_path / "repo/fabric-tools.deb", tmp_path / "log"
    right = package.read_bytes()
    (tmp_path / "right.deb").write_bytes(right)
    package.write_bytes(right[:-1] + b"!" + added)
    settled = f"[ $(wc -l < {log}) -lt {settled_after} ] || cp {tmp_path}/right.deb {package}"
    program(tmp_path / "bin/sleep", f"echo slept >> {log}; {settled}")

    def answer(request: Request) -> tuple[int, bytes]:
        file = tmp_path / "repo" / request.path.lstrip("/.")
        return (200, file.read_bytes()) if file.is_file() else (404, b"")

    with serving(answer) as url:
        (tmp_path / "etc/sources.list").write_text(f"deb [trusted=yes] {url} ./\n")
        with pytest.raises(AssertionError, match="Hash Sum mismatch") if settled_after > 3 else nullcontext():
            sh(INSTALL, "fabric-tools", **environment)
    assert log.read_text().split().count("slept") == tries


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(INSTALL, "Packages  407  Proxy Authentication Required", id="apt-103"),
        pytest.param(
            f'{FETCH}fetch "http://repo.example.net/$1" /none',
            "/fabric-tools cannot be fetched; the reason",
            id="elbe-121",
        ),
    ],
)
def test_what_a_proxy_refuses_is_shown(tmp_path: Path, environment: dict[str, str], text: str, said: str) -> None:
    with serving(lambda request: (407, b"")) as proxy:
        with (tmp_path / "apt.conf").open("a") as file:
            file.write(f'Acquire::http::Proxy "{proxy}"; Acquire::Retries "0";\n')
        (tmp_path / "etc/sources.list").write_text("deb [trusted=yes] http://repo.example.net ./\n")
        with pytest.raises(AssertionError) as caught:
            sh(text, "fabric-tools", **environment)
    assert "407" in str(caught.value)
    assert said in str(caught.value)


def test_grave_bugs_in_debian_s_list_end_no_installation(tmp_path: Path) -> None:
    """As apt-listbugs does it without a terminal, as a hook of apt."""
    program(
        tmp_path / "bin/apt-get",
        '[ "$APT_LISTBUGS_FRONTEND" = none ] || { echo "returned an error code (10)"; exit 100; }',
    )
    sh(f"{packages.APT}apt_update\napt_install install -- perftest", programs=tmp_path / "bin")
