"""DKMS: which modules it has built for which kernel, why a build failed, and whether the kernel runs what is installed."""

from __future__ import annotations

import re

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common.commands import Commands, refuse, script

OUT_OF_TREE = ("/updates/", "/extra/", "/weak-updates/")
"""Folders below /lib/modules/RELEASE for modules that are not the kernel's own: DKMS on Debian uses updates/dkms, on
Ubuntu updates/dkms, on RHEL extra; weak-updates links to those of a compatible kernel."""

CAUSE = """
cause() {  # of a failed DKMS build: module, kernel
  [ -n "$1" ] || return 0
  if [ ! -e "/lib/modules/$2/build/include" ]; then
    echo "the headers of the kernel $2 are missing, so DKMS cannot build $1 for it:" >&2
    echo "install linux-headers-$2 (Debian, Ubuntu) or kernel-devel-$2 (RHEL); the key 'kernel' does" >&2
  fi
  for log in "${DKMS:-/var/lib/dkms}/$1"/*/build/make.log; do
    [ -e "$log" ] || continue
    echo "the build of $1 failed; from $log:" >&2
    grep -nE -m 10 'error: |No rule to make|No such file|undefined!|Error! |not found' "$log" >&2 ||
      tail -n 10 "$log" >&2
  done
}
"""
"""A shell function: what a person needs to know of a failed build, on standard error."""


@frozen
class Build:
    """A line of `dkms status`. ``state`` is ``added``, ``built`` or ``installed``; an added one is for no kernel yet."""

    module: str
    version: str
    kernel: str | None
    state: str


@frozen
class Module:
    """A kernel module on disk and in memory; a part that does not exist is None.

    ``installed`` and ``loaded`` are its srcversion, a checksum of the sources (scripts/mod/sumversion.c), from `modinfo` and
    from /sys/module/NAME/srcversion. A kernel without CONFIG_MODULE_SRCVERSION_ALL, as Debian's, gives it only to modules with
    a version; else the build ID of the ELF file stands in its place, or the empty text.
    """

    path: str | None
    installed: str | None
    loaded: str | None
    users: int

    @property
    def is_loaded(self) -> bool:
        """It is in memory, or built into the kernel."""
        return self.loaded is not None

    @property
    def stale(self) -> bool:
        """Another build is loaded than is installed."""
        return bool(self.loaded) and bool(self.installed) and self.loaded != self.installed

    @property
    def out_of_tree(self) -> bool:
        """What is installed is not the kernel's own."""
        return self.path is not None and any(folder in self.path for folder in OUT_OF_TREE)


class Builds(FactBase[list[Build]]):
    """What `dkms status` says; empty without DKMS."""

    default = list

    def command(self) -> StringCommand:
        """One line a module, version and kernel."""
        return script("if command -v dkms >/dev/null; then dkms status; fi")

    def process(self, output: list[str]) -> list[Build]:
        """``erdma/1.0, 6.1.0-9-amd64, x86_64: installed``; before DKMS 3, ``erdma, 1.0, ...``; ``erdma/1.0: added``."""
        found = []
        for line in output:
            place, _, state = line.partition(": ")
            name, *rest = re.split(r", |/", place)
            if rest and state:
                found.append(Build(name, rest[0], rest[1] if len(rest) > 1 else None, state.split()[0].rstrip("(")))
        return found


# The note is 16 bytes of head and the ID. It is looked for in the file as a whole: no ELF reader is needed.
_MODULE = """
module=$1
path=$(modinfo -n -- "$module" 2>/dev/null) || path=
echo "path $path"
if [ -n "$path" ]; then echo "installed $(modinfo -F srcversion -- "$path" 2>/dev/null)"; fi
loaded=/sys/module/$(echo "$module" | tr - _)
if [ -d "$loaded" ]; then
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
fi
"""


class ModuleState(FactBase[Module]):
    """A kernel module on disk and in memory."""

    def command(self, module: str) -> StringCommand:
        """One script; a module that does not exist is no error."""
        return script(_MODULE, module)

    def process(self, output: list[str]) -> Module:
        """Lines of a word and its value."""
        found = dict(line.partition(" ")[::2] for line in output)
        path, loaded = found.get("path") or None, found.get("loaded")
        installed = found.get("installed")
        if loaded == "" and ("same" in found or "other" in found):
            installed, loaded = "by build ID", "by build ID" if "same" in found else "another"
        return Module(path, installed, loaded, int(found.get("users") or 0))


class RunningKernel(FactBase[str]):
    """Its release, as `uname -r` prints it."""

    def command(self) -> StringCommand:
        """Ask the kernel."""
        return StringCommand("uname", "-r")

    def process(self, output: list[str]) -> str:
        """Its only line."""
        return output[0]


_BUILD = (
    CAUSE
    + """
module=$1 version=$2 kernel=$3; shift 3
failed() { cause "$module" "$kernel"; exit 1; }
if [ $# != 0 ]; then dkms build -m "$module" -v "$version" -k "$kernel" --force || failed; fi
dkms install -m "$module" -v "$version" -k "$kernel" "$@" || failed
"""
)


def build(module: str, version: str, kernel: str, force: bool = False) -> StringCommand:
    """The command that builds and installs a module for a kernel; it fails with the build log's cause.

    :param force: build it anew although it is installed: what it is built against has changed.
    """
    return script(_BUILD, module, version, kernel, *(["--force"] if force else []))


@operation()
def installed(module: str) -> Commands:
    """Have every version that DKMS knows of a module be installed for the running kernel: the newest, that is.

    A package's own script does that, but skips it without a word when the kernel's headers are missing.
    """
    kernel = host.get_fact(RunningKernel)
    builds = [found for found in host.get_fact(Builds) if found.module == module]
    if any((found.kernel, found.state) == (kernel, "installed") for found in builds):
        host.noop(f"{module} is installed for {kernel}")
        return
    if not builds:
        yield refuse(f"DKMS knows no module {module}; its package does not bring what the inventory says")
        return
    yield build(module, builds[-1].version, kernel)
