"""Public reports of DKMS: builds of a module whose source is gone, and builds without the compiler of the kernel."""

from pathlib import Path

import pytest

from tasks.packages import dkms
from tests.deploy.packages.test_dkms import cause
from tests.deploy.scripts import sh
from tests.stand_ins import program, text_file

# As dkms 2.8.7, 3.0.10 and 3.0.11 were seen to do it.
DKMS = """
[ "$1" = status ] || exit 1
for build in {tree}/${{3:-*}}/${{5:-*}}/*/x86_64; do
  version=${{build%/*/*}} module=${{build%/*/*/*}} kernel=${{build%/*}}
  [ -e "$version/source/dkms.conf" ] || {{ echo 'Error! Could not locate dkms.conf file.' >&2; exit; }}
  echo "${{module##*/}}/${{version##*/}}, ${{kernel##*/}}, x86_64: installed"
done
"""


@pytest.mark.parametrize(
    ("gone", "there"),
    [
        pytest.param("nvidia/535.104.05", "nvidia/580.95.05", id="dkms-352"),
        pytest.param("a-module/1", "erdma/1.0", id="dkms-52"),
        pytest.param("iser/24.10", "mlnx-ofed-kernel/25.10", id="zfs-9891"),
    ],
)
def test_a_module_whose_source_is_gone_hides_no_other(tmp_path: Path, gone: str, there: str) -> None:
    for each in (gone, there):
        (tmp_path / "tree" / each / "6.1/x86_64").mkdir(parents=True)
        (tmp_path / "tree" / each / "source").symlink_to(tmp_path / "src" / each)
    text_file(tmp_path / "src" / there / "dkms.conf")
    program(tmp_path / "bin/dkms", DKMS.format(tree=tmp_path / "tree"))
    output = sh(dkms._BUILDS, programs=tmp_path / "bin", DKMS=str(tmp_path / "tree"))
    module, _, version = there.partition("/")
    assert dkms.Builds().process(output) == [dkms.Build(module, version, "6.1", "installed")]


GCC_12 = "x86_64-linux-gnu-gcc-12 (Ubuntu 12.3.0-1ubuntu1~22.04) 12.3.0"
AUTO_INIT = "gcc: error: unrecognized command-line option `-ftrivial-auto-var-init=zero`"
CHECK = (
    "Compiler version check failed:\n\n*** Failed CC version check. Bailing out! ***\nmake[2]: *** [Kbuild:180] Error 1"
)


@pytest.mark.parametrize(
    ("log", "named"),
    [
        pytest.param(AUTO_INIT, True, id="eks-machine-learning-107"),
        pytest.param("gcc: error: unrecognized command-line option `-mharden-sls=all`", True, id="i915-sriov-dkms-85"),
        pytest.param("gcc: error: unrecognized command line option '-mharden-sls=all'", True, id="gcc-8"),
        pytest.param(CHECK, True, id="compute-gpu-installation-15"),
        pytest.param("/bin/sh: 1: gcc-12: not found", True, id="gcc-12"),
        pytest.param("/bin/sh: line 1: clang-18: command not found", True, id="clang"),
        pytest.param("erdma_main.c:9:1: error: unknown type name 'oops'", False, id="other"),
    ],
)
def test_a_build_that_lacks_the_kernels_compiler_says_so(tmp_path: Path, log: str, named: bool) -> None:
    text_file(tmp_path / "erdma/1.0/build/make.log", f"make: Entering directory\n{log}\n")
    assert ("was built by another compiler (see /proc/version): install" in cause(tmp_path)) is named
    text_file(tmp_path / "boot/config-0.0.0-none", f'CONFIG_CC_IS_GCC=y\nCONFIG_CC_VERSION_TEXT="{GCC_12}"\n')
    assert (f"the kernel was built by {GCC_12}: install that compiler" in cause(tmp_path)) is named
