"""Drivers: the loaded modules are the installed ones, and DKMS has built its modules for the running kernel."""

from collections.abc import Iterator

import pytest

from tests.node.evidence import Finding, Node, equal, judge

pytestmark = pytest.mark.drivers

# Where a module has no srcversion (those of Debian's kernel), the build ID of the loaded one must be found in the file: it
# is in the bytes of its note from the 17th on.
_MODULES = """
python3 -I - "$@" <<'END'
import gzip, lzma, pathlib, subprocess, sys

def said(*words):
    return subprocess.run(["modinfo", *words], stdout=subprocess.PIPE, universal_newlines=True).stdout.strip()

for module in sys.argv[1:]:
    path, loaded = said("-n", module), pathlib.Path("/sys/module", module)
    note = loaded / "notes/.note.gnu.build-id"
    if (loaded / "srcversion").exists():
        print(module, "srcversion", said("-F", "srcversion", module) or "none", (loaded / "srcversion").read_text().strip())
    elif note.exists() and path.startswith("/"):
        readers = {".xz": lzma.decompress, ".gz": gzip.decompress}
        readers[".zst"] = lambda data: subprocess.run(["zstd", "-dc"], input=data, stdout=subprocess.PIPE).stdout
        data = readers.get(pathlib.Path(path).suffix, bytes)(pathlib.Path(path).read_bytes())
        ours = note.read_bytes()[16:]
        print(module, "build-ID", ours.hex() if ours in data else "another", ours.hex())
END
"""

# What DKMS has built for the running kernel, and which file modprobe would take.
_BUILT = """
for file in /var/lib/dkms/*/*/"$(uname -r)"/*/module/*.ko*; do
  if [ -e "$file" ]; then name=${file##*/}; name=${name%%.ko*}; echo "$name $(modinfo -n "$name" || true)"; fi
done
"""


def modules(node: Node) -> list[str]:
    """What stands on the RDMA core, it itself, and the drivers of the PCI functions."""
    loaded = {
        words[0]: words[3].split(",") for line in node.run("cat /proc/modules").splitlines() if (words := line.split())
    }
    rdma = {"ib_core", *loaded.get("ib_core", ())} & loaded.keys()
    return sorted(rdma | (set(node.drivers.values()) & loaded.keys()))


def compared(node: Node) -> Iterator[Finding]:
    for line in node.run(_MODULES, *modules(node)).splitlines():
        module, what, installed, loaded = line.split()
        yield equal(module, f"{what} of the loaded module, which is to be the installed one's", installed, loaded)


def test_loaded_modules_are_the_installed_ones(node: Node) -> None:
    judge(node, compared(node), "no driver reports its version")


def built(node: Node) -> Iterator[Finding]:
    kernel = node.run("uname -r").strip()
    states: dict[str, set[str]] = {}
    for line in node.run("if command -v dkms >/dev/null; then dkms status; fi").splitlines():
        place, _, state = line.partition(": ")
        name, *rest = place.replace("/", ", ").split(", ")
        states.setdefault(name, set()).update([state.split()[0]] if kernel in rest else [])
    for name, in_states in states.items():
        yield Finding(
            name,
            f"by DKMS for {kernel}",
            "installed",
            ", ".join(sorted(in_states)) or "not built",
            "installed" in in_states,
        )
    for line in node.run(_BUILT).splitlines():
        name, _, path = line.partition(" ")
        beside = any(f"/{folder}/" in path for folder in ("updates", "extra", "weak-updates"))
        yield Finding(name, "file that modprobe loads", "DKMS's, in updates or extra", path or "none", beside)


def test_what_dkms_builds_is_installed_for_the_running_kernel(node: Node) -> None:
    judge(node, built(node), "there is nothing of DKMS")
