import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tasks.common.commands import script
from tasks.common.data import Key, leftovers, record
from tasks.packages import Family, dnf_install, holds, vendor_repository
from tasks.packages.holds import HeldPackages
from tasks.packages.vendor_repository import KeyFingerprints, Package, Repository
from tests.deploy.conftest import Node, file_answers, of
from tests.deploy.scripts import ran, sh
from tests.deploy.systems import dpkg, rpm
from tests.programs import failure, success
from tests.stand_ins import program

FINGERPRINT = "83DB6997E7844970861FCB6BEA39500F9B4DFB6F"
OTHER = "0" * 40
GIVEN: dict[str, Any] = {
    "uri": "http://repo.example.net/doca",
    "key": "http://repo.example.net/key.asc",
    "fingerprint": FINGERPRINT,
}
KEY = Key("ofed", None, record(Repository))
RING = "/etc/apt/keyrings/trackbed-doca.gpg"
SOURCE = f"""\
# Written by Trackbed; changes here are overwritten.
Types: deb
URIs: http://repo.example.net/doca
Suites: ./
Signed-By: {RING}
"""
DNF = """\
# Written by Trackbed; changes here are overwritten.
[trackbed-doca]
name=doca, by Trackbed
baseurl=http://repo.example.net/doca
enabled=1
skip_if_unavailable=1
gpgcheck=1
gpgkey=file:///etc/pki/rpm-gpg/RPM-GPG-KEY-trackbed-doca
"""
WANTED = (Package("erdma-dkms", "1.1"), Package("dkms"))


def add(family: Family = "debian") -> None:
    vendor_repository.configure("doca", Repository(**GIVEN), family)


def have(family: Family = "debian") -> None:
    vendor_repository.packages(name="packages", wanted=WANTED, family=family, module="erdma")


def test_the_key_is_installed_before_the_source(node: Node) -> None:
    result = node.deploy(add, dpkg("gpg=2.2"))
    assert list(result.planned) == ["doca: key of its repository", "doca: repository"]
    [key] = result.commands["doca: key of its repository"]
    assert key.endswith(f" sh http://repo.example.net/key.asc {FINGERPRINT} {RING} ''")
    assert result.uploads == {"/etc/apt/sources.list.d/trackbed-doca.sources": SOURCE.encode()}


def test_gpg_is_installed_where_it_is_missing(node: Node) -> None:
    result = node.deploy(add, dpkg())
    install, key = result.commands["doca: key of its repository"]
    assert install.endswith(" sh '' '' gpg")
    assert FINGERPRINT in key


def test_nothing_is_done_if_the_repository_is_in_place(node: Node) -> None:
    there = file_answers("/etc/apt/sources.list.d/trackbed-doca.sources", SOURCE)
    assert node.deploy(add, {**dpkg("gpg=2.2"), of(KeyFingerprints): FINGERPRINT, **there}).did_nothing


def test_a_keyring_with_another_key_is_written_anew(node: Node) -> None:
    result = node.deploy(add, {**dpkg("gpg=2.2"), of(KeyFingerprints): [FINGERPRINT, OTHER]})
    assert result.planned["doca: key of its repository"]


def test_a_key_that_has_expired_and_stays_is_a_warning(node: Node) -> None:
    # The fact leaves out expired keys.
    result = node.deploy(add, {**dpkg("gpg=2.2"), of(KeyFingerprints): []})
    assert not result.failed
    assert any(f"the key {FINGERPRINT} in {RING} has expired" in line for line in result.log)
    extended = node.deploy(add, {**dpkg("gpg=2.2"), of(KeyFingerprints): FINGERPRINT})
    assert "has expired" not in "".join(extended.log)


def test_on_rhel_the_repository_is_a_file_of_dnf(node: Node) -> None:
    result = node.deploy(lambda: add("rhel"), rpm("gnupg2=2.3"))
    [key] = result.commands["doca: key of its repository"]
    assert key.endswith(f" {FINGERPRINT} /etc/pki/rpm-gpg/RPM-GPG-KEY-trackbed-doca --armor")
    assert result.uploads == {"/etc/yum.repos.d/trackbed-doca.repo": DNF.encode()}


def test_signed_metadata_can_replace_signed_packages(node: Node) -> None:
    repository = Repository(**GIVEN, repo_gpgcheck=True)
    result = node.deploy(lambda: vendor_repository.configure("doca", repository, "rhel"), rpm("gnupg2=2.3"))
    text = DNF.replace("gpgcheck=1", "gpgcheck=0\nrepo_gpgcheck=1")
    assert result.uploads == {"/etc/yum.repos.d/trackbed-doca.repo": text.encode()}


@pytest.mark.parametrize(("listed", "hinted"), [(1, True), (0, False)])
def test_if_no_repository_has_dkms_the_error_says_where_it_is(tmp_path: Path, listed: int, hinted: bool) -> None:
    fake = f"case $* in *'list dkms'*) exit {listed} ;; esac\necho 'nothing provides dkms needed by erdma-dkms' >&2; exit 1"
    program(tmp_path / "dnf", fake)
    for name in ("awk", "sh", "tr", "uname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    # No other program is found: the login's PATH ends with the folder, and so does the script's.
    text = f"PATH={tmp_path}\n{vendor_repository._DNF}"
    said = failure(ran(script(text, "erdma", "", "", "erdma-dkms-1.1"), DKMS=str(tmp_path)))
    assert ("for the RHEL family is in EPEL" in said) == hinted


def test_a_package_is_installed_at_its_version_and_held(node: Node) -> None:
    result = node.deploy(have, dpkg())
    install, hold = result.flat
    assert install.endswith(" sh erdma '' erdma-dkms=1.1 dkms")
    assert "--allow-downgrades --allow-change-held-packages" in install
    assert hold.endswith("apt-mark hold erdma-dkms")


@pytest.mark.parametrize(
    ("version", "held", "ends"),
    [
        ("1.0", "erdma-dkms", [" sh erdma '' erdma-dkms=1.1", " apt-mark hold erdma-dkms"]),
        ("1.1", [], [" apt-mark hold erdma-dkms"]),
        ("1.1", "erdma-dkms", []),
    ],
    ids=["upgrade", "removed hold", "in place"],
)
def test_an_upgrade_is_held_again_and_what_is_in_place_is_left_alone(
    node: Node, version: str, held: str | list[str], ends: list[str]
) -> None:
    result = node.deploy(have, {**dpkg(f"erdma-dkms={version}", "dkms=3.0"), of(HeldPackages): held})
    assert result.planned == {"packages": bool(ends)}
    assert [command[-len(end) :] for command, end in zip(result.flat, ends, strict=True)] == ends


def test_an_upgrade_by_dnf_removes_the_lock_first(node: Node) -> None:
    locked = {of(HeldPackages): "erdma-dkms-0:1.0.*"}
    result = node.deploy(lambda: have("rhel"), {**rpm("erdma-dkms=1.0", "dkms=3.0"), **locked})
    assert result.flat[0].endswith(" dnf versionlock delete erdma-dkms")
    assert result.flat[1].endswith(" sh erdma '' '' erdma-dkms-1.1")
    plugin, lock = result.flat[2:]
    assert plugin == str(dnf_install("python3-dnf-plugin-versionlock"))
    assert lock.endswith(" dnf versionlock add erdma-dkms-1.1")


def test_dnf5_whose_locks_are_not_supported_is_refused_before_anything_is_installed(node: Node) -> None:
    result = node.deploy(lambda: have("rhel"), rpm("dnf5=5.2.10", "python3-dnf=4.22"))
    [refused] = result.flat
    assert refused.startswith("refuse: dnf on this node is dnf5")
    # Before Fedora 41 dnf5 may be installed beside dnf.
    assert not node.deploy(lambda: have("rhel"), rpm("dnf5=5.2.10", "dnf=4.22")).failed
    # Nothing is to be held.
    loose = (Package("dkms"),)
    result = node.deploy(lambda: vendor_repository.packages(wanted=loose, family="rhel"), rpm("dnf5=5.2.10"))
    assert not result.failed


def test_dnfs_locks_are_read_from_the_file_that_its_configuration_names(tmp_path: Path) -> None:
    plugins = tmp_path / "etc/dnf/plugins"
    plugins.mkdir(parents=True)

    def locks() -> dict[str, str | None]:
        message = sh(f'{holds.LOCKS}locks "$1"', tmp_path)
        return holds.HeldPackages().process(message)

    assert locks() == {}
    (plugins / "versionlock.list").write_text("\n# Added lock on Sun Nov 22\nkernel-0:5.14.0-427.el9.*\n")
    assert locks() == {"kernel": "5.14.0-427.el9"}
    (plugins / "versionlock.conf").write_text("[main]\nenabled = 1\nlocklist = /etc/dnf/other.list\n")
    (tmp_path / "etc/dnf/other.list").write_text("dkms-0:3.1.*\n")
    assert locks() == {"dkms": "3.1"}


def test_dnf_locks_the_package_at_its_version(node: Node) -> None:
    there = {**rpm("erdma-dkms=1.1", "dkms=3.0"), of(HeldPackages): "erdma-dkms-0:1.1.*"}
    assert node.deploy(lambda: have("rhel"), there).flat == []


def test_a_fingerprint_may_be_given_as_gpg_prints_it() -> None:
    spaced = "83DB 6997 E784 4970 861F  CB6B EA39 500F 9B4D fb6f"
    key = KEY.read({"ofed": {**GIVEN, "fingerprint": spaced}}, "node-a")
    assert key is not None
    assert key.fingerprint == FINGERPRINT


# The script that installs a key, run here for real, with gpg's own keys.


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    home = folder / "home"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--batch", "--quiet", "--homedir", str(home)]
    made = {}
    for name in ("ours", "theirs"):
        subprocess.run([*gpg, "--passphrase", "", "--quick-generate-key", name, "ed25519", "sign", "never"], check=True)
        listing = subprocess.run(
            [*gpg, "--with-colons", "--list-keys", name], capture_output=True, text=True, check=True
        ).stdout
        fingerprint = next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:"))
        made[fingerprint] = folder / f"{name}.asc"
    both = folder / "both.asc"
    for fingerprint, path in made.items():
        subprocess.run([*gpg, "--armor", "--output", str(path), "--export", fingerprint], check=True)
    subprocess.run([*gpg, "--armor", "--output", str(both), "--export"], check=True)
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True)
    return {**made, "both": both}


def install_key(source: Path, want: str, ring: Path, *, armor: str = "") -> subprocess.CompletedProcess[str]:
    # In the place of a download: the rest of the script is what it is.
    text = vendor_repository._KEY.replace('fetch "$url" "$home/key"', 'cp "$url" "$home/key"')
    return ran(script(text, str(source), want, str(ring), armor))


def fingerprints(ring: Path) -> list[str]:
    return sh(str(vendor_repository.KeyFingerprints().command(str(ring))))


def test_only_the_wanted_key_of_a_file_is_installed(keys: dict[str, Path], tmp_path: Path) -> None:
    want = next(iter(keys))
    for armor in ("", "--armor"):
        ring = tmp_path / "keyrings" / f"ring{armor}.gpg"
        success(install_key(keys["both"], want, ring, armor=armor))
        assert fingerprints(ring) == [want]
        assert ring.stat().st_mode & 0o777 == 0o644
        assert ring.read_bytes().startswith(b"-----BEGIN") == bool(armor)


def test_a_wrong_key_is_refused_with_both_fingerprints(keys: dict[str, Path], tmp_path: Path) -> None:
    ours, theirs, _ = keys
    ring = tmp_path / "ring.gpg"
    said = failure(install_key(keys[theirs], ours, ring))
    assert f"has the fingerprint {theirs}, expected is {ours}; nothing was installed" in said
    assert not ring.exists()


def test_a_web_page_in_place_of_the_key_is_refused(keys: dict[str, Path], tmp_path: Path) -> None:
    page, ring = tmp_path / "page", tmp_path / "ring.gpg"
    page.write_text("<html>403</html>")
    assert "none: it is not a key" in failure(install_key(page, next(iter(keys)), ring))
    assert not ring.exists()


@pytest.mark.parametrize(
    ("conf", "settings"),
    [
        (None, []),
        ("[main]\nproxy=_none_\nbest=True\n", []),
        # dnf takes no white space at the end.
        ("[main]\nproxy=http://proxy.example.net:3128 \t\r\n", ['proxy = "http://proxy.example.net:3128"']),
        (
            '[main]\nproxy = http://proxy.example.net:3128\nproxy_username=fleet\nproxy_password=a:"b\\c\nsslcacert=/etc/own.pem\n',
            ['proxy = "http://proxy.example.net:3128"', 'proxy-user = "fleet:a:\\"b\\\\c"', 'cacert = "/etc/own.pem"'],
        ),
    ],
)
def test_without_apt_a_file_is_fetched_by_dnfs_proxy_whose_password_is_in_no_argument(
    tmp_path: Path, conf: str | None, settings: list[str]
) -> None:
    program(tmp_path / "curl", 'cat > "$LOG.settings"\necho "$@" > "$LOG"')
    if conf:
        (tmp_path / "dnf.conf").write_text(conf)
    log = tmp_path / "log"
    files = {"LOG": str(log), "APT_HELPER": f"{tmp_path}/none", "DNF_CONF": f"{tmp_path}/dnf.conf"}
    text = f'{vendor_repository.FETCH}fetch "$1" "$2"'
    sh(text, "https://repo.example.net/key", tmp_path / "key", programs=tmp_path, **files)
    assert (tmp_path / "log.settings").read_text().splitlines() == settings
    assert log.read_text().startswith("--config - --fail")
    assert "fleet" not in log.read_text()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("--connect-timeout 30", id="openclaw-109001"),
        pytest.param("--speed-limit 1 --speed-time 120", id="open-code-review-1292"),
    ],
)
def test_a_server_or_a_proxy_that_does_not_answer_is_given_up(tmp_path: Path, options: str) -> None:
    """Without the second option, curl waits for ever for one that takes the connection."""
    program(tmp_path / "curl", 'echo "$@" > "$LOG"')
    files = {"LOG": str(tmp_path / "log"), "APT_HELPER": f"{tmp_path}/none", "DNF_CONF": f"{tmp_path}/dnf.conf"}
    sh(f"{vendor_repository.FETCH}fetch https://repo.example.net/key /none", programs=tmp_path, **files)
    assert f" {options} " in (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def expired(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A key's fingerprint, the key after it has expired, and as its owner has extended it."""
    folder = tmp_path_factory.mktemp("expired")
    home = folder / "home"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--batch", "--quiet", "--homedir", str(home), "--passphrase", ""]
    was = ["--faked-system-time", "20200101T000000"]
    subprocess.run([*gpg, *was, "--quick-generate-key", "vendor", "ed25519", "sign", "30d"], check=True)
    short, extended = folder / "short.gpg", folder / "extended.gpg"
    subprocess.run([*gpg, "--output", str(short), "--export"], check=True)
    listing = subprocess.run([*gpg, "--with-colons", "--list-keys"], capture_output=True, text=True, check=True).stdout
    fingerprint = next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:"))
    subprocess.run([*gpg, "--quick-set-expire", fingerprint, "0"], check=True)
    subprocess.run([*gpg, "--output", str(extended), "--export"], check=True)
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True)
    return fingerprint, short, extended


def test_a_key_that_has_expired_is_replaced_by_the_extended_one(
    expired: tuple[str, Path, Path], tmp_path: Path
) -> None:
    want, short, extended = expired
    ring = tmp_path / "ring.gpg"
    ring.write_bytes(short.read_bytes())
    assert fingerprints(ring) == []
    assert install_key(extended, want, ring).returncode == 0
    assert fingerprints(ring) == [want]


@pytest.mark.parametrize("there", [True, False])
def test_an_expired_key_stays_if_there_is_no_extended_one(
    expired: tuple[str, Path, Path], tmp_path: Path, there: bool
) -> None:
    want, short, _ = expired
    ring, source = tmp_path / "ring.gpg", short if there else tmp_path / "missing"
    ring.write_bytes(short.read_bytes())
    success(install_key(source, want, ring))
    assert ring.read_bytes() == short.read_bytes()


@pytest.mark.parametrize("name", ["doca", "docker", "erdma", "nvidia-container-toolkit", "nvidia-driver"])
def test_the_removal_knows_the_files_of_every_vendor(name: str) -> None:
    written = {f"/etc/apt/sources.list.d/trackbed-{name}.sources", f"/etc/apt/keyrings/trackbed-{name}.gpg"}
    written |= {f"/etc/yum.repos.d/trackbed-{name}.repo", f"/etc/pki/rpm-gpg/RPM-GPG-KEY-trackbed-{name}"}
    assert written == set(vendor_repository.files_of(name))
    assert written <= set(leftovers())
