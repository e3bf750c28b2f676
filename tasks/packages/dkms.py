"""DKMS: the modules it has built for each kernel, why a build failed, and whether a loaded module is the installed one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common.commands import Commands, refuse, script
from tasks.common.facts import FactBase, Lines, Yes
from tasks.time_limits import LIMITS

OUT_OF_TREE = ("/updates/", "/extra/", "/weak-updates/")
"""Folders in /lib/modules/RELEASE for modules that are not the kernel's own. DKMS uses updates/dkms on Debian and Ubuntu, and
extra on RHEL; weak-updates has links to modules of a compatible kernel."""

CAUSE = """
cause() {  # arguments: module, kernel
  [ -n "$1" ] || return 0
  if [ ! -e "/lib/modules/$2/build/include" ]; then
    echo "the headers of the kernel $2 are missing, so DKMS cannot build $1 for it:" >&2
    echo "install linux-headers-$2 (Debian, Ubuntu) or kernel-devel-$2 (RHEL), or give the key 'kernel', which does so" >&2
  fi
  for log in "${DKMS:-/var/lib/dkms}/$1"/*/build/make.log; do
    [ -e "$log" ] || continue
    echo "the build of $1 failed; from $log:" >&2
    grep -nE -m 10 'error: |No rule to make|No such file|undefined!|Error! |not found' "$log" >&2 ||
      tail -n 10 "$log" >&2
    if grep -qE 'unrecognized command.line option|CC version check|(gcc|clang)[-0-9]*: (command )?not found' "$log"; then
      built=$(sed -n 's/^CONFIG_CC_VERSION_TEXT="\\(.*\\)"/\\1/p' "${MACHINE:-}/boot/config-$2" 2>/dev/null) || true
      echo "the kernel was built by ${built:-another compiler (see /proc/version)}: install that compiler, let gcc lead to" \\
        "it (update-alternatives(1)), and deploy again" >&2
    fi
  done
}
"""
"""A shell function that prints the likely cause of a failed DKMS build to standard error. MACHINE: the root; only tests set it.

A kernel of a later release, as Ubuntu's HWE kernels, may be built by another compiler than the release's own gcc. That knows
not all of the kernel's options, or NVIDIA's driver refuses it.
"""

MAKE_INITRAMFS = """
if command -v update-initramfs >/dev/null; then update-initramfs -u -k "$(uname -r)"
else dracut --force --kver "$(uname -r)"
fi
"""
"""A script that makes the running kernel's initramfs again, with the modules and their options as they are now."""


@frozen
class Build:
    """A line of `dkms status`. ``state``: ``added`` (then it has no kernel), ``built`` or ``installed``.

    ``replaced``: DKMS says that it is installed, but the kernel's file differs from the built one. Either a tool has signed the
    file, or the kernel had a newer version, which DKMS does not overwrite.
    """

    module: str
    version: str
    kernel: str | None
    state: str
    replaced: bool = False


@frozen
class Module:
    """A kernel module on disk and in memory. A part is None if the file or the loaded module does not exist.

    ``installed`` and ``loaded``: the srcversion, a checksum of the sources (scripts/mod/sumversion.c), from `modinfo` and from
    /sys/module/NAME/srcversion. A kernel without CONFIG_MODULE_SRCVERSION_ALL, as Debian's, gives it only to modules with a
    version. Others are compared by the build ID of the ELF file; if there is none, the fields are empty.
    """

    name: str
    path: str | None
    installed: str | None
    loaded: str | None
    users: int

    @classmethod
    def parse(cls, lines: list[str]) -> Module:
        """Parse lines of a word and its value, as :data:`MODULE` prints them."""
        values = dict(line.partition(" ")[::2] for line in lines)
        path, loaded = values.get("path") or None, values.get("loaded")
        installed = values.get("installed")
        if loaded == "" and ("same" in values or "other" in values):
            installed, loaded = "by build ID", "by build ID" if "same" in values else "another"
        return cls(values.get("module", ""), path, installed, loaded, int(values.get("users") or 0))

    @property
    def is_loaded(self) -> bool:
        """Whether it is loaded or built into the kernel."""
        return self.loaded is not None

    @property
    def stale(self) -> bool:
        """Whether the loaded module is not the installed one."""
        return bool(self.loaded) and bool(self.installed) and self.loaded != self.installed

    @property
    def out_of_tree(self) -> bool:
        """Whether the installed file is not the kernel's own."""
        return self.path is not None and any(folder in self.path for folder in OUT_OF_TREE)


# Each is asked for alone: `dkms status` before 3.0.13 ends, with 0, at the first module that has builds and no source any more
# (read_conf_or_die in dkms). Nothing can be built of such a one.
_BUILDS = """
command -v dkms >/dev/null || exit 0
for file in "${DKMS:-/var/lib/dkms}"/*/*/source/dkms.conf; do
  [ -e "$file" ] || continue
  version=${file%/source/dkms.conf} module=${file%/*/source/dkms.conf}
  dkms status -m "${module##*/}" -v "${version##*/}"
done
"""


class Builds(FactBase[list[Build]]):
    """DKMS's builds, as far as it has the source; empty without DKMS."""

    default = list
    shell = _BUILDS

    def process(self, output: list[str]) -> list[Build]:
        """Parse lines such as ``erdma/1.0, 6.1.0-9-amd64, x86_64: installed`` or ``erdma/1.0: added``.

        Before DKMS 3 a line begins with ``erdma, 1.0``.

        :returns: the builds by module, the newest version last.
        """
        builds = []
        for line in output:
            place, _, state = line.partition(": ")
            name, *rest = re.split(r", |/", place)
            if rest and state:
                kernel = rest[1] if len(rest) > 1 else None
                builds.append(Build(name, rest[0], kernel, state.split()[0].rstrip("("), bool(_REPLACED.search(state))))
        return sorted(builds, key=lambda build: (build.module, by_number(build.version)))


def by_number(version: str) -> list[tuple[bool, int, str]]:
    """A key that sorts 1.10 after 1.9, which `dkms status` lists the other way round."""
    parts = re.findall(r"[0-9]+|[^0-9.]+", version)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def newest(builds: Iterable[Build]) -> list[Build]:
    """Those of a module's builds that are of its newest version."""
    ordered = list(builds)
    return [build for build in ordered if build.version == ordered[-1].version]


# DKMS before 3.1.5, then later ones (Debian 13, EPEL).
_REPLACED = re.compile("Diff(erences)? between built and installed module")

_OTHERS = """
module=$1 version=$2 kernel=$3
for built in "${DKMS:-/var/lib/dkms}/$module/$version/$kernel"/*/module/*.ko*; do
  [ -e "$built" ] || continue
  name=${built##*/}
  name=${name%%.ko*}
  for field in version srcversion; do
    if [ "$(modinfo -F "$field" -- "$built")" != "$(modinfo -k "$kernel" -F "$field" -- "$name")" ]; then
      echo "$name"
      break
    fi
  done
done
"""


class OtherModules(Lines):
    """The modules of a build that differ from the kernel's in version or sources. Signatures are not compared."""

    def command(self, module: str, version: str, kernel: str) -> StringCommand:
        """Compare each module in DKMS's tree with the kernel's."""
        return self.script(_OTHERS, module, version, kernel)


def is_installed(builds: Iterable[Build], kernel: str) -> bool:
    """For an operation: whether the kernel has the modules of one of the builds."""
    return any((build.kernel, build.state) == (kernel, "installed") and not _is_replaced(build) for build in builds)


def _is_replaced(build: Build) -> bool:
    if not build.replaced:
        return False
    return bool(host.get_fact(OtherModules, module=build.module, version=build.version, kernel=build.kernel))


# The build ID's note is found in the module's file by a search for its bytes, which needs no ELF parser.
MODULE = """
module() {  # arguments: the module, the root folder
  path=$(modinfo -n -- "$1" 2>/dev/null) || path=
  printf '%s\\n' "module $1" "path $path"
  if [ -n "$path" ]; then echo "installed $(modinfo -F srcversion -- "$path" 2>/dev/null)"; fi
  loaded=$2/sys/module/$(echo "$1" | tr - _)
  [ -d "$loaded" ] || return 0
  echo "users $(cat "$loaded/refcnt" 2>/dev/null || echo 0)"
  echo "loaded $(cat "$loaded/srcversion" 2>/dev/null || true)"
  note=$loaded/notes/.note.gnu.build-id
  if [ ! -e "$loaded/srcversion" ] && [ -e "$note" ] && [ -n "$path" ]; then
    python3 -I - "$note" "$path" <<'END'
import gzip, lzma, pathlib, subprocess, sys
note, path = map(pathlib.Path, sys.argv[1:])
readers = {".xz": lzma.decompress, ".gz": gzip.decompress}
readers[".zst"] = lambda data: subprocess.run(["zstd", "-dc"], input=data, stdout=subprocess.PIPE, check=True).stdout
data = readers.get(path.suffix, bytes)(path.read_bytes())
print("same" if note.read_bytes() in data else "other")
END
  fi
}
"""
"""The shell function `module`, which prints what :class:`Module` has."""


class ModuleState(FactBase[Module]):
    """A kernel module on disk and in memory."""

    def command(self, module: str) -> StringCommand:
        """Read both by one script. A module that does not exist is no error."""
        return self.script(f'{MODULE}module "$1"', module)

    def process(self, output: list[str]) -> Module:
        """Parse the only module."""
        return Module.parse(output)


class RunningKernel(FactBase[str]):
    """The release of the running kernel."""

    def command(self) -> StringCommand:
        """Run `uname -r`."""
        return StringCommand("uname", "-r")


# Compares change times: they tell when a file was written to this disk. A modification time comes from the package.
_NEWER_INPUT = """
module=$1 kernel=$2 options=$3
module=$(modinfo -k "$kernel" -n "$module" 2>/dev/null) || exit 0
built=$(stat -c %Z -- "$module")
for symbols in "/usr/src/ofa_kernel/$(uname -m)/$kernel/Module.symvers" /usr/src/ofa_kernel/default/Module.symvers; do
  [ -e "$symbols" ] || continue
  if [ "$(stat -c %Z -- "$symbols")" -gt "$built" ]; then echo "$symbols"; fi
  break
done
if [ -e "$options" ] && [ "$(stat -c %Z -- "$options")" -gt "$built" ]; then echo "$options"; fi
"""


class NewerInput(Yes):
    """Whether OFED's Module.symvers or the options of the build are newer than an installed module, built with others then."""

    def command(self, module: str, kernel: str, options: str = "") -> StringCommand:
        """Compare each file with the module's."""
        return self.script(_NEWER_INPUT, module, kernel, options)


# Without --force `dkms install` leaves a newer version of the kernel in place, with the exit code 0. DKMS before 3.0.10 (Ubuntu
# 22.04 has 2.8.7) ignores --force for what is built or installed, also with the exit code 0. So that is undone first. There
# `dkms uninstall` ends with 1 even if it succeeds, and with an error if the module is only built.
#
# To build again, the former build is put aside, without which DKMS builds anew (prepare_build in dkms). If that fails, the
# former build returns. The kernel's file stays until the new build is complete: the node may boot before the next deploy.
_BUILD = (
    CAUSE
    + """
module=$1 version=$2 kernel=$3 again=${4-}
failed() { cause "$module" "$kernel"; exit 1; }
built=${DKMS:-/var/lib/dkms}/$module/$version/$kernel
former=${built%/*}/.$kernel.trackbed
# It is there if this script was interrupted, as by a power cut.
if [ -n "$again" ] || [ -e "$former" ]; then
  trap 'if [ -e "$former" ]; then rm -rf "$built"; mv "$former" "$built"; fi' EXIT
  # Without this, dash ends at a signal without the trap above.
  trap 'exit 129' HUP INT TERM
  if [ -e "$built" ]; then rm -rf "$former"; mv "$built" "$former"; fi
  dkms build -m "$module" -v "$version" -k "$kernel" || failed
  rm -rf "$former"
fi
dkms uninstall -m "$module" -v "$version" -k "$kernel" >/dev/null 2>&1 || true
dkms install -m "$module" -v "$version" -k "$kernel" --force || failed
"""
)


def build(module: str, version: str, kernel: str, limit: int, force: bool = False) -> StringCommand:
    """A command that has DKMS install a module for a kernel. It replaces any other version, and is built first if necessary.

    If it fails, it prints the cause from the build log.

    :param limit: the seconds that it may take.
    :param force: build it again although it is built, since what it is built against has changed.
    """
    return script(_BUILD, module, version, kernel, *(["again"] if force else []), limit=limit)


@operation()
def installed(module: str) -> Commands:
    """Have DKMS install the newest version of a module for the running kernel.

    A package's own script does so, too, but silently skips it if the kernel's headers are missing.
    """
    builds = newest(each for each in host.get_fact(Builds) if each.module == module)
    missing = f"DKMS has no module {module}: the package did not install its source"
    yield from install(builds, host.get_fact(RunningKernel), missing)


def install(
    builds: list[Build], kernel: str, missing: str, is_old: Callable[[str], bool] = lambda _: False
) -> Commands:
    """For an operation: have DKMS install the last of a module's builds for a kernel.

    :param missing: the error if there is none.
    :param is_old: whether what is installed for the kernel was built with something that has changed since.
    """
    there = is_installed(builds, kernel)
    if not builds:
        yield refuse(missing)
    elif not there or is_old(kernel):
        yield build(builds[-1].module, builds[-1].version, kernel, LIMITS.here().build, force=there)
    else:
        host.noop(f"{builds[-1].module} {builds[-1].version} is installed for {kernel}")
