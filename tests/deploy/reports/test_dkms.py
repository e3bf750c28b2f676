"""Public reports of a DKMS that has builds of a module whose source is gone: what it says of the other modules."""

import os
from pathlib import Path

import pytest

from tasks.packages import dkms
from tests.deploy.scripts import sh
from tests.stand_ins import program

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
    (tmp_path / "src" / there).mkdir(parents=True)
    (tmp_path / "src" / there / "dkms.conf").touch()
    program(tmp_path / "bin/dkms", DKMS.format(tree=tmp_path / "tree"))
    output = sh(dkms._BUILDS, PATH=f"{tmp_path}/bin:{os.environ['PATH']}", DKMS=str(tmp_path / "tree"))
    module, _, version = there.partition("/")
    assert dkms.Builds().process(output) == [dkms.Build(module, version, "6.1", "installed")]
