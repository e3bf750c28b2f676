"""Entries of apt for a repository that the deploy also wants, as the guides of vendors make them. Real apt in a folder."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks import packages
from tasks.packages import vendor_repository
from tasks.packages.apt_sources import RepositoryEntries
from tasks.packages.vendor_repository import KeyFingerprints, Repository
from tests.deploy.conftest import SOURCES, Node, Result, file_answers, of
from tests.deploy.packages.test_vendor_repository import keys
from tests.deploy.scripts import ran, sh
from tests.deploy.systems import dpkg
from tests.stand_ins import program

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="a node's script for apt")
__all__ = ["keys"]

HOME = "https://repo.example.net/linux"
OURS = "/etc/apt/sources.list.d/trackbed-docker.sources"


class Apt:
    """A folder that apt takes for its configuration, with the right key and another one in keyrings.

    ``others``: the entry that the operator has.
    """

    def __init__(self, root: Path, keys: dict[str, Path]) -> None:
        self.etc, self.root = root / "etc", root
        for folder in ("etc/sources.list.d", "etc/trusted.gpg.d", "etc/apt.conf.d", "lists", "rings"):
            (root / folder).mkdir(parents=True)
        (root / "status").touch()
        self.fingerprint, theirs, _ = keys
        self.key = keys[self.fingerprint].read_text()
        self.right = self.ring("right.asc", self.key)
        self.wrong = self.ring("wrong.asc", keys[theirs].read_text())
        (root / "apt.conf").write_text(
            f'Dir::Etc "{self.etc}"; Dir::State "{root}"; Dir::State::status "{root}/status"; Dir::Cache "{root}"; '
            'APT::Architecture "amd64"; APT::Architectures {"amd64"; "i386";};'
        )

    def ring(self, name: str, text: str) -> Path:
        path = self.root / "rings" / name
        path.write_text(text)
        return path

    def put(self, name: str, text: str) -> Path:
        path = self.etc / "sources.list.d" / name
        path.write_text(text)
        return path

    def repository(self, **given: Any) -> Repository:
        ordinary = {"uri": HOME, "suite": "noble", "components": ("stable",)}
        return Repository(key=f"{HOME}/gpg", fingerprint=self.fingerprint, **{**ordinary, **given})

    def deploy(self, node: Node, repository: Repository | None = None) -> Result:
        wanted = repository or self.repository()
        path, text = vendor_repository.source("docker", wanted, "debian")
        command = RepositoryEntries().command(path=path, text=text)
        answer = sh(shlex.split(str(command))[2], path, text, APT_CONFIG=str(self.root / "apt.conf"))
        answers = {
            **dpkg("gpg=2.2"),
            of(KeyFingerprints): wanted.fingerprint,
            SOURCES: answer,
            **file_answers(OURS, text),
        }
        result = node.deploy(lambda: vendor_repository.configure("docker", wanted, "debian"), answers)
        # What the deploy would leave behind, for apt itself.
        ours = self.put(Path(OURS).name, text)
        if removes(result):
            ours.unlink()
        done = ran("apt-get -q update --print-uris", APT_CONFIG=f"{self.root}/apt.conf", LC_ALL="C")
        assert "Conflicting values" not in done.stderr, done.stderr
        return result


@pytest.fixture
def apt(tmp_path: Path, keys: dict[str, Path]) -> Apt:
    return Apt(tmp_path, keys)


def removes(result: Result) -> bool:
    """Whether the deploy removes its own entry, which an earlier deploy has left."""
    return any(f"rm -f {OURS}" in command for command in result.flat)


def used(result: Result) -> bool:
    """Whether the deploy uses the operator's entry, and removes its own."""
    return not result.failed and removes(result)


def inline(key: str) -> str:
    return "\n" + "\n".join(f" {line or '.'}" for line in key.splitlines())


def test_without_another_entry_the_deploy_writes_its_own(node: Node, apt: Apt) -> None:
    apt.put("ubuntu.list", "deb http://archive.example.net/ubuntu noble main\n")
    apt.put("off.sources", f"Types: deb\nEnabled: no\nURIs: {HOME}\nSuites: noble\nComponents: stable\nSigned-By: /x\n")
    apt.put("other.list", f"# deb {HOME} noble stable\ndeb [signed-by=/y] {HOME} jammy stable\n")
    # To apt these are other repositories, so they may have other keys.
    for number, uri in enumerate(("https://Repo.example.net/linux", "https://repo.example.net:443/linux", f"{HOME}/x")):
        apt.put(f"other{number}.list", f"deb [signed-by=/y] {uri} noble stable\n")
    result = apt.deploy(node)
    assert not result.failed
    assert result.flat == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("docker.list", "deb [arch=amd64 signed-by={right}] {home} noble stable"),
        ("docker.list", "# by a guide\n\ndeb [ signed-by={right},{wrong} ] {home}/ noble edge stable"),
        ("docker.sources", "Types: deb\nURIs: {home}\nSuites: noble\nComponents: stable\nSigned-By: {right}"),
        (
            "docker.sources",
            "# two\n\nTypes: deb\nURIs: http://other.example.net\nSuites: x\nComponents: y\nSigned-By: {wrong}\n\n"
            "types: deb deb-src\nuris: http://mirror.example.net {home}/\nsigned-by:\n {wrong}\n {right}\nsuites: jammy noble\n"
            "components: stable",
        ),
        ("docker.sources", "Types: deb\nURIs: {home}\nSigned-By:{inline}\nSuites: noble\nComponents: stable"),
        ("docker.list", "deb [signed-by={fingerprint}] {home} noble stable"),
        ("docker.list", "deb [signed-by={small}!] {home} noble stable"),
        ("docker.list", 'deb [arch=amd64 signed-by="{right}"] {home} noble stable\r'),
        ("docker.sources", "Types: deb\r\nURIs: {home}\r\nSigned-By: {right}\r\nSuites: noble\r\nComponents: stable\r"),
        # Other addresses that apt takes for the same repository.
        ("docker.list", "deb [signed-by={right}] http://repo.example.net/linux/ noble stable"),
        ("docker.list", "deb [signed-by={right}] https://user:word@repo.example.net/linux noble stable"),
        ("docker.list", "deb [signed-by={right}] mirror+https://repo.example.net/linux noble stable"),
    ],
)  # fmt: skip
def test_an_entry_with_the_right_key_is_used(node: Node, apt: Apt, name: str, text: str) -> None:
    values = {"right": apt.right, "wrong": apt.wrong, "fingerprint": apt.fingerprint, "inline": inline(apt.key)}
    values["small"] = apt.fingerprint.lower()
    apt.put(name, text.format(home=HOME, **values) + "\n")
    assert used(apt.deploy(node))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("docker.list", id="nvidia-container-toolkit-170"),
        pytest.param("zypper.list", id="cuda-repo-management-4"),
    ],
)
def test_an_entry_without_signed_by_is_used_if_apt_trusts_the_right_key(node: Node, apt: Apt, name: str) -> None:
    # apt reads zypper.list after the deploy's file: then the two would differ, whichever key it is.
    path = apt.put(name, f"deb {HOME} noble stable\n")
    refused = apt.deploy(node)
    assert refused.failed
    assert f"{path}:1 has" in refused.errors[0] and apt.fingerprint in refused.errors[0]
    shutil.copy(apt.right, apt.etc / "trusted.gpg.d/docker.asc")
    assert used(apt.deploy(node))


def test_a_flat_repository_is_found_by_what_apt_makes_of_its_address(node: Node, apt: Apt) -> None:
    apt.put("toolkit.list", f"deb [signed-by={apt.right}] {HOME}/deb/amd64 /\n")
    assert used(apt.deploy(node, apt.repository(uri=HOME + "/deb/$(ARCH)", suite="/", components=())))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(
            "deb [signed-by={wrong}] {home} noble stable",
            ":1 has this repository, but not with the key {fingerprint}",
            id="nvidia-docker-1626",
        ),
        ("deb [signed-by={wrong}] http://repo.example.net/linux noble stable", ":1 has this repository, but not with"),
        ("deb [signed-by=/absent.gpg] {home} noble stable", ":1 has this repository, but not with the key"),
        ("deb-src [signed-by={right}] {home} noble stable", ":1: this repository is there without stable"),
        ("deb [signed-by={right}] {home} noble test", ":1: this repository is there without stable"),
        ("deb [arch=i386 signed-by={right}] {home} noble stable", ":1: this repository is there without stable"),
    ],
)
def test_an_entry_that_does_not_do_is_refused_by_its_name(node: Node, apt: Apt, text: str, reason: str) -> None:
    values = {"right": apt.right, "wrong": apt.wrong, "fingerprint": apt.fingerprint}
    path = apt.put("docker.list", text.format(home=HOME, **values) + "\n")
    result = apt.deploy(node)
    assert result.failed
    assert f"docker: {path}{reason.format(**values)}" in result.errors[0]
    # All the same, so that apt reads its sources again.
    assert removes(result)


def test_a_node_whose_sources_apt_cannot_read_is_refused(node: Node, apt: Apt) -> None:
    path = apt.put("broken.list", "deb nonsense\n")
    result = apt.deploy(node)
    assert result.failed
    assert f"Malformed entry 1 in list file {path}" in result.errors[0]
    assert not result.uploads


def test_an_entry_that_comes_later_keeps_no_other_package_from_being_installed(apt: Apt) -> None:
    ours = apt.put(Path(OURS).name, vendor_repository.source("docker", apt.repository(), "debian")[1])
    theirs = apt.put("docker.list", f"deb [signed-by={apt.wrong}] {HOME} noble stable\n")
    program(apt.root / "bin/apt-get", 'exec /usr/bin/apt-get "$@" --print-uris')

    def update() -> None:
        sh(f"{packages.APT}apt_update", programs=apt.root / "bin", APT_CONFIG=f"{apt.root}/apt.conf")

    update()
    assert not ours.exists()
    # A conflict of the operator's own is left to the operator.
    apt.put("second.list", f"deb [signed-by={apt.right}] {HOME} noble stable\n")
    with pytest.raises(AssertionError, match="Conflicting values"):
        update()
    assert theirs.exists()
