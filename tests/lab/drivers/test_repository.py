"""The lab's vendor repository by itself: no node is needed."""

import subprocess
import urllib.request
from pathlib import Path

import pytest

from lab import host, repository, rpm
from lab.command import run
from tests.stand_ins import text_file


def test_a_repository_is_served_and_signed_by_the_key_that_it_names(tmp_path: Path) -> None:
    tree, pool = tmp_path / "tree", tmp_path / "pool"
    text_file(tree / "usr/bin/tool", "#!/bin/sh\n")
    (tree / "usr/bin/tool").chmod(0o755)
    pool.mkdir()
    repository.deb(pool, {"Package": "tool", "Version": "1.0"}, tree, {"postinst": "#!/bin/sh\n"})
    repository.dkms_deb(pool, "driver", "2.0", tree, 'BUILT_MODULE_NAME="driver"\n')
    repository.sign(pool)
    made = repository.Repository(pool)

    with repository.serve(pool) as url, urllib.request.urlopen(url.replace(repository.HOST, "127.0.0.1")) as page:  # noqa: S310
        assert "InRelease" in page.read().decode()
    shown = run(["gpg", "--show-keys", "--with-colons", "--homedir", tmp_path, made.key])
    assert made.fingerprint in shown
    ring = tmp_path / "ring.gpg"
    run(["gpg", "--homedir", tmp_path, "--output", ring, "--dearmor", made.key])
    assert subprocess.run(["gpgv", "--keyring", ring, pool / "InRelease"], check=False).returncode == 0
    listing = run(["dpkg-deb", "-c", made.deb("driver-dkms", "2.0")])
    assert "./usr/src/driver-2.0/dkms.conf" in listing
    assert run(["dpkg-deb", "-f", made.deb("tool", "1.0"), "Package"]).strip() == "tool"
    assert "-rwxr-xr-x root/root" in run(["dpkg-deb", "-c", made.deb("tool", "1.0")])


def test_rpms_have_the_files_scripts_and_exact_dependencies_of_the_debs_and_are_signed(tmp_path: Path) -> None:
    host.ensure_packages(rpm.PROGRAMS)
    tree, debs, pool = tmp_path / "tree", tmp_path / "debs", tmp_path / "pool"
    text_file(tree / "usr/bin/a tool", "#!/bin/sh\n")
    (tree / "var/lib/tool").mkdir(parents=True)
    debs.mkdir()
    pool.mkdir()
    repository.deb(debs, {"Package": "tool", "Version": "1:1.0-2", "Depends": "libtool (= 3.0), libc6, dkms"}, tree, {})
    repository.deb(debs, {"Package": "tool", "Version": "1.1"})
    repository.deb(debs, {"Package": "libtool", "Version": "3.0"}, None, {"postinst": "#!/bin/sh\necho made $1\n"})
    rpm.from_debs(pool, debs.glob("*.deb"), {"libtool": "tool-libs", "dkms": "dkms"}, scripts=True)
    rpm.sign(pool)

    tool, libs = pool / "tool-1.0-2.x86_64.rpm", pool / "tool-libs-3.0-1.x86_64.rpm"
    assert (pool / "tool-1.1-1.x86_64.rpm").exists()
    assert run(["rpm", "-qpl", tool]).splitlines() == ["/usr/bin/a tool", "/var/lib/tool"]
    needs = run(["rpm", "-qp", "--requires", tool]).splitlines()
    assert {"tool-libs = 3.0-1", "dkms"} <= set(needs)
    assert not any("libc6" in line for line in needs)
    assert "echo made $1" in run(["rpm", "-qp", "--scripts", libs])
    database = ("--dbpath", str(tmp_path / "database"))
    run(["rpm", *database, "--import", pool / "key.asc"])
    assert "signatures OK" in run(["rpmkeys", *database, "--checksig", tool])
    assert "BEGIN PGP SIGNATURE" in (pool / "repodata/repomd.xml.asc").read_text()


def test_a_folder_of_the_cache_is_made_once_for_the_same_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = repository.cached("tools", [b"1"], made.append)
    assert repository.cached("tools", [b"1"], made.append) == first
    assert repository.cached("tools", [b"2"], made.append) != first
    assert len(made) == 2
