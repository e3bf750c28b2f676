"""What docs/extending.md promises: a kind and a VF attribute are one file each, a driver family is a row, a probe a row and a
name.

The files and the row are the examples of that page.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.programs import success
from tests.stand_ins import text_file

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
FAMILY = "driver_families.py"


def examples() -> dict[str, str]:
    """The files that the page shows in full, by the path in their first line."""
    blocks = re.findall(r"^```python\n# agent/(\S+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return dict(blocks)


def converged(folder: Path, **attributes: Any) -> Any:
    """What a pass made of the simulated machine, by an agent with the files of ``folder`` as well; ``attributes`` of VFs."""
    command = [sys.executable, "-m", "tests.unit.extended", str(folder), json.dumps(attributes)]
    return json.loads(success(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)))


def write(folder: Path, names: list[str]) -> None:
    for name in names:
        path = folder / name
        text_file(path, examples()[name])


def test_the_page_shows_a_kind_a_probe_a_driver_family_and_a_vf_attribute() -> None:
    assert sorted(name.rpartition("/")[0] or name for name in examples()) == [
        FAMILY,
        "kinds",
        "probes",
        "spec/vf_attributes",
    ]


def test_a_kind_is_one_file(tmp_path: Path) -> None:
    write(tmp_path, [name for name in examples() if name.startswith(("kinds/", "probes/"))])
    assert converged(tmp_path)["numa_balancing"] == "0"


def test_a_probe_is_a_row_and_a_name_that_the_spec_can_set(tmp_path: Path) -> None:
    write(tmp_path, [name for name in examples() if name.startswith("probes/")])
    result = converged(tmp_path)
    assert result["conditions"]["Temperature"] == ["False", "TooHot"]
    assert result["numa_balancing"] == "1"


def test_a_driver_family_is_one_row(tmp_path: Path) -> None:
    names = [name for name in examples() if name.startswith("probes/")]
    write(tmp_path, names)
    unknown = converged(tmp_path)
    assert unknown["irqs"]["queue"] == unknown["irqs"]["management"]
    write(tmp_path, [FAMILY])
    known = converged(tmp_path)
    # The queue's interrupt has a CPU of the NIC's NUMA node for itself; the management one may use both.
    assert (known["irqs"]["queue"], known["irqs"]["management"]) == ("2", "2-3")


def test_a_vf_attribute_is_one_file(tmp_path: Path) -> None:
    write(tmp_path, [name for name in examples() if not name.startswith("kinds/")])
    result = converged(tmp_path, tx_rate=300)
    assert result["conditions"]["Converged"] == ["True", "AsWanted"]
    assert [vf["tx_rate"] for vf in result["reported"]] == [300, 300]
    assert result["message"]["tx_rate"] == 300
    assert result["inspect"].count("tx rate 300") == 2
    assert result["as_spec"]["tx_rate"] == 300
    assert {"minimum": 0, "maximum": 2**32 - 1}.items() <= result["schema"]["tx_rate"]["anyOf"][0].items()
    row = ["tx_rate", "the highest transmit rate of the VF", "Mbit/s; 0 is none", "left alone"]
    assert row in result["reference"]
    with pytest.raises(AssertionError, match="tx_rate: -1 is out of range; give 0 to 4294967295 Mbit/s"):
        converged(tmp_path, tx_rate=-1)


def test_without_its_file_a_vf_attribute_is_unknown_to_the_spec(tmp_path: Path) -> None:
    write(tmp_path, [name for name in examples() if name.startswith("probes/")])
    with pytest.raises(AssertionError, match="unknown key 'tx_rate'"):
        converged(tmp_path, tx_rate=300)


def test_without_its_name_a_probe_is_unknown_to_the_spec(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unknown probe 'temperature'"):
        converged(tmp_path)
