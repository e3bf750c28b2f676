import subprocess
from pathlib import Path

import pytest
from attrs import define

from tasks.common.commands import script
from tasks.packages import dkms
from tasks.packages.dkms import Builds, OtherModules
from tests.deploy.conftest import Node, of
from tests.deploy.scripts import ran, sh
from tests.programs import success
from tests.stand_ins import program, text_file

KERNEL = {"uname -r": "6.1.0-9-amd64"}


def installed() -> None:
    dkms.installed(name="built", module="erdma")


def test_the_output_of_each_version_of_dkms_is_parsed() -> None:
    lines = [
        "erdma/1.0, 6.1.0-9-amd64, x86_64: installed",
        "erdma, 1.0, 5.15.0-7-generic, x86_64: installed (WARNING! Diff between built and installed module!)",
        "erdma/1.0, 6.12.0-7-amd64, x86_64: installed (Differences between built and installed modules)",
        "nvidia/1.0, 6.1.0-9-amd64, x86_64: installed (original_module exists)",
        "mlnx-ofed-kernel/24.10: added",
        "Error! something else",
    ]
    assert dkms.Builds().process(lines) == [
        dkms.Build("erdma", "1.0", "6.1.0-9-amd64", "installed"),
        dkms.Build("erdma", "1.0", "5.15.0-7-generic", "installed", replaced=True),
        dkms.Build("erdma", "1.0", "6.12.0-7-amd64", "installed", replaced=True),
        dkms.Build("mlnx-ofed-kernel", "24.10", None, "added"),
        dkms.Build("nvidia", "1.0", "6.1.0-9-amd64", "installed"),
    ]


def test_the_newest_version_is_not_the_last_of_the_alphabet() -> None:
    builds = dkms.Builds().process(["erdma/1.10: added", "erdma/1.9, 6.1.0-9-amd64, x86_64: installed"])
    assert dkms.newest(builds) == [dkms.Build("erdma", "1.10", None, "added")]
    assert dkms.newest([]) == []


@pytest.mark.parametrize(
    ("lines", "stale", "out_of_tree"),
    [
        (["path /lib/modules/6/updates/dkms/a.ko", "installed AB", "users 0", "loaded AB"], False, True),
        (["path /lib/modules/6/kernel/a.ko.xz", "installed AB", "users 1", "loaded CD"], True, False),
        (["path /lib/modules/6/extra/a.ko", "installed ", "users 0", "loaded ", "other"], True, True),
        (["path /lib/modules/6/extra/a.ko", "installed ", "users 0", "loaded ", "same"], False, True),
        (["path /lib/modules/6/extra/a.ko", "installed AB"], False, True),
        (["path "], False, False),
    ],
)
def test_a_module_in_memory_is_compared_with_its_file(lines: list[str], stale: bool, out_of_tree: bool) -> None:
    module = dkms.ModuleState().process(lines)
    assert (module.stale, module.out_of_tree) == (stale, out_of_tree)


REPLACED = " (WARNING! Diff between built and installed module!)"


@pytest.mark.parametrize(
    ("build", "others", "changes"),
    [
        ("6.1.0-9-amd64, x86_64: installed", [], False),
        ("6.1.0-8-amd64, x86_64: installed", [], True),
        (f"6.1.0-9-amd64, x86_64: installed{REPLACED}", ["erdma"], True),
        (f"6.1.0-9-amd64, x86_64: installed{REPLACED}", [], False),
    ],
    ids=["installed", "for another kernel", "another in its place", "another signature"],
)
def test_a_module_is_built_unless_it_is_installed_for_the_running_kernel(
    node: Node, build: str, others: list[str], changes: bool
) -> None:
    answers = {of(Builds): f"erdma/1.0, {build}", of(OtherModules, "erdma", "1.0", "6.1.0-9-amd64"): others}
    result = node.deploy(installed, {**KERNEL, **answers})
    assert result.planned == {"built": changes}
    assert [command.endswith(" sh erdma 1.0 6.1.0-9-amd64") for command in result.flat] == [True] * changes


def test_modules_of_a_build_are_compared_with_the_kernel_s_by_version_and_sources(tmp_path: Path) -> None:
    of_the_kernel = 'if [ "$1" = -k ]; then file=$KERNEL/$2/$file.ko.xz; shift 2; fi'
    program(tmp_path / "modinfo", f'for file; do :; done\n{of_the_kernel}\nsed -n "s/^$2: //p" "$file"')
    tree, kernel = tmp_path / "dkms/mlnx/1.0/6.1/x86_64/module", tmp_path / "6.1"
    tree.mkdir(parents=True)
    kernel.mkdir()
    built = "version: 1\nsrcversion: AB\n"
    for name, text in {
        "same": f"{built}sig_id: 1\n",
        "older": "version: 0\nsrcversion: AB\n",
        "other": "version: 1\n",
    }.items():
        (tree / f"{name}.ko").write_text(built)
        (kernel / f"{name}.ko.xz").write_text(text)
    (tree / "gone.ko.zst").write_text(built)
    command = dkms.OtherModules().command("mlnx", "1.0", "6.1").get_raw_value()
    assert sh(command, programs=tmp_path, KERNEL=str(tmp_path), DKMS=f"{tmp_path}/dkms") == ["gone", "older", "other"]


# As dkms 2.8.7 (Ubuntu 22.04) was seen to do it: --force changes nothing about what is built or installed, with exit code 0,
# and an uninstallation that succeeds ends with 1.
DKMS_2_8 = """
built=$DKMS/$3/$5/$7 active=$DKMS/$3/kernel-$7
case $1 in
build) [ -e "$built" ] || cp "$SOURCE" "$built" || exit 10 ;;
install) if [ -e "$built" ] && [ ! -e "$active" ]; then cp "$built" "$KERNEL" && touch "$active"; fi ;;
unbuild) [ -e "$built" ] || exit 4; rm -f "$built" "$active" "$KERNEL" ;;
uninstall) [ -e "$active" ] || exit 4; rm -f "$active" "$KERNEL"; exit 1 ;;
esac
"""


@define
class Tree:
    """A node's DKMS, with a build of erdma, and the kernel's file of it."""

    folder: Path
    source: Path
    kernel: Path
    built: Path
    active: Path

    def build(self, again: bool = False) -> subprocess.CompletedProcess[str]:
        files = {"DKMS": f"{self.folder}/tree", "SOURCE": str(self.source), "KERNEL": str(self.kernel)}
        return ran(dkms.build("erdma", "1.1", "6.1", 600, force=again).get_raw_value(), self.folder, **files)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    program(tmp_path / "dkms", DKMS_2_8)
    module = tmp_path / "tree/erdma"
    made = Tree(tmp_path, tmp_path / "source", tmp_path / "erdma.ko", module / "1.1/6.1", module / "kernel-6.1")
    text_file(made.built, "built")
    made.kernel.write_text("another")
    made.source.write_text("with new options")
    return made


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("active", [True, False])
def test_a_build_is_installed_whatever_dkms_makes_of_force(tree: Tree, again: bool, active: bool) -> None:
    if active:
        tree.active.touch()
    success(tree.build(again))
    assert tree.kernel.read_text() == ("with new options" if again else "built")


def test_a_build_with_new_options_that_fails_leaves_the_former_one(tree: Tree) -> None:
    assert tree.build().returncode == 0
    tree.source.unlink()
    assert tree.build(again=True).returncode == 1
    assert (tree.built.read_text(), tree.kernel.read_text()) == ("built", "built")
    assert tree.active.exists()
    assert list(tree.built.parent.iterdir()) == [tree.built]


def test_a_build_that_a_power_cut_interrupted_is_made_by_the_next_deploy(tree: Tree) -> None:
    assert tree.build().returncode == 0
    former = tree.built.rename(tree.built.parent / ".6.1.trackbed")
    # To this deploy the module is not built.
    assert tree.build().returncode == 0
    assert tree.kernel.read_text() == "with new options"
    assert not former.exists()


def test_a_package_without_the_module_is_refused(node: Node) -> None:
    assert "DKMS has no module erdma" in node.deploy(installed, {**KERNEL, of(Builds): "other/1.0: added"}).refusal


def cause(folder: Path) -> str:
    cause_of = script(f'{dkms.CAUSE}cause "$1" "$2"', "erdma", "0.0.0-none")
    return ran(cause_of, DKMS=str(folder), MACHINE=str(folder)).stderr


def test_the_cause_of_a_failed_build_is_shown(tmp_path: Path) -> None:
    message = cause(tmp_path)
    assert "linux-headers-0.0.0-none" in message and "kernel-devel-0.0.0-none" in message
    log = tmp_path / "erdma/1.0/build/make.log"
    text_file(log, "make: Entering\nerdma_main.c:9:1: error: unknown type name 'oops'\nmake: leaving\n")
    message = cause(tmp_path)
    assert f"the build of erdma failed; from {log}:" in message
    assert "2:erdma_main.c:9:1: error: " in message
    assert "Entering" not in message
    log.write_text("Killed\n")
    assert "Killed" in cause(tmp_path)
