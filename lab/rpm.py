"""Makes RPM packages, and repositories of them like those of vendors for the RHEL family: packages and metadata are signed."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

import attrs

from lab import host, repository
from lab.command import run
from lab.repository import Repository

PROGRAMS = ("createrepo-c", "rpm")

# rpm strips and compresses programs by default, and reads which libraries they need. Nothing of that is wanted here.
_SPEC = Template("""\
%define __os_install_post %{nil}
%define debug_package %{nil}
%define _build_id_links none
%define _binary_payload w0.gzdio
Name: $name
Version: $version
Release: $release
Summary: of Trackbed's lab
License: none
AutoReqProv: no
$relations
%description
Of Trackbed's lab.
%install
mkdir -p %{buildroot}
cp -a $tree/. %{buildroot}
%post
$post
%preun
$preun
%files
$files
""")


@attrs.frozen
class Rpm:
    """An RPM package. ``version`` includes the release: ``1.20.1-1``.

    ``post``: a shell script that rpm runs after it has installed the package. ``preun``: a shell script that rpm runs before it
    removes the package; its argument is 1 if a newer version replaces the package, else 0.
    """

    name: str
    version: str
    requires: Sequence[str] = ()
    provides: Sequence[str] = ()
    post: str = ":"
    preun: str = ":"


def build(pool: Path, package: Rpm, files: Path | None = None) -> Path:
    """Make a package of the files below a folder. Their owner becomes root, and their modes stay.

    The package lists files and empty folders. rpm makes the other folders when it installs the files.
    """
    version, _, release = package.version.partition("-")
    with TemporaryDirectory(prefix="trackbed-rpm-") as name:
        work = Path(name)
        tree = files or work / "empty"
        tree.mkdir(exist_ok=True)
        owned = [path for path in sorted(tree.rglob("*")) if path.is_symlink() or not path.is_dir() or _is_empty(path)]
        relations = [f"Requires: {each}" for each in package.requires]
        relations += [f"Provides: {each}" for each in package.provides]
        spec = work / "package.spec"
        spec.write_text(
            _SPEC.substitute(
                name=package.name,
                version=version,
                release=release,
                relations="\n".join(relations),
                tree=tree,
                post=package.post,
                preun=package.preun,
                files="\n".join(f'%attr(-, root, root) "/{path.relative_to(tree)}"' for path in owned),
            )
        )
        run(["rpmbuild", "-bb", "--quiet", "--define", f"_topdir {work}/rpmbuild", spec])
        made = next((work / "rpmbuild/RPMS").rglob("*.rpm"))
        return Path(shutil.move(made, pool / made.name))


def _is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def from_debs(pool: Path, debs: Iterable[Path], names: Mapping[str, str], scripts: bool) -> None:
    """Make a package of each of these Debian packages. Of its dependencies it keeps those on the others and on ``names``.

    :param names: names for some packages in place of Debian's.
    :param scripts: keep their scripts. Those of Debian's own packages call programs of dpkg.
    """
    host.ensure_packages(PROGRAMS)
    # One package may be there in several versions.
    packages = [(run(["dpkg-deb", "--field", deb, "Package"]).strip(), deb) for deb in debs]
    called = {**names, **{name: names.get(name, name) for name, _ in packages}}
    for name, deb in packages:
        version, depends = (run(["dpkg-deb", "--field", deb, field]).strip() for field in ("Version", "Depends"))
        with TemporaryDirectory(prefix="trackbed-rpm-") as folder:
            tree = Path(folder) / "tree"
            run(["dpkg-deb", "-R", deb, tree])
            control = Path(folder) / "control"
            (tree / "DEBIAN").rename(control)
            package = Rpm(
                called[name],
                _rpm_version(version),
                requires=[line for each in depends.split(",") if (line := _requirement(each, called))],
                post=_POST + _body(control / "postinst") if scripts else ":",
                preun=_PREUN + _body(control / "prerm") if scripts else ":",
            )
            build(pool, package, tree)


# The arguments that dpkg gives to the same scripts.
_POST = "set -- configure ''\n"
_PREUN = 'if [ "$1" = 0 ]; then set -- remove; else set -- upgrade; fi\n'


def _body(script: Path) -> str:
    return script.read_text() if script.exists() else ":"


def _rpm_version(version: str) -> str:
    upstream, _, revision = version.rpartition(":")[2].partition("-")
    return f"{upstream}-{revision.replace('-', '.') or '1'}"


def _requirement(depends: str, called: Mapping[str, str]) -> str:
    """Translate a dependency of a Debian package to RPM's syntax. The version is dropped unless its operator is `=` or `>=`.

    :param called: RPM's names of the packages. A dependency on another package is dropped: the result is empty.
    """
    words = depends.replace("(", " ").replace(")", " ").split("|")[0].split()
    if not words or words[0] not in called:
        return ""
    version = f" {words[1]} {_rpm_version(words[2])}" if words[1:2] in (["="], [">="]) else ""
    return called[words[0]] + version


def like(name: str, vendor: Repository) -> Repository:
    """A vendor's repository for the RHEL family: the same packages as RPMs. It is made first if it is not cached."""
    debs = sorted(vendor.folder.glob("*.deb"))

    def make(folder: Path) -> None:
        # DKMS is in another repository: for the RHEL family, EPEL.
        from_debs(folder, debs, {"dkms": "dkms"}, scripts=True)
        sign(folder)

    inputs = [str(vendor.folder).encode(), *repository.source_of(__file__)]
    return Repository(repository.cached(f"rpm-{name}", inputs, make))


def index(folder: Path) -> None:
    """Write the metadata of the packages in the folder."""
    run(["createrepo_c", "--quiet", folder])


def sign(folder: Path) -> None:
    """Sign the packages in the folder, and write its metadata, signed, with a key made for that alone."""
    with repository.signing_key(folder) as home:
        packages = sorted(folder.glob("*.rpm"))
        key = ("--define", f"_gpg_name {repository.MAINTAINER}", "--define", "__gpg /usr/bin/gpg")
        run(["rpmsign", *key, "--addsign", *packages], env={**os.environ, "GNUPGHOME": home})
        index(folder)
        metadata = folder / "repodata/repomd.xml"
        run([*repository.GPG, home, "--yes", "--armor", "--output", f"{metadata}.asc", "--detach-sign", metadata])
