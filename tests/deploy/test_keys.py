"""Each key of the inventory is described in docs/inventory/keys.yaml, from which its pages are made."""

import pytest
import yaml
from attrs import fields

from handbook.spec import KEYS, section
from tasks.common.data import SPEC_KEYS, task_keys
from tasks.containers.container_engine import ContainerEngine
from tasks.drivers.gpu_driver import GpuDriver


def test_each_key_is_described_and_no_other_one() -> None:
    sections = yaml.safe_load(KEYS.read_text())
    assert set(sections["node"]) == set(SPEC_KEYS)
    named = {name for names in sections["deploy"] for name in names.split(", ")}
    assert named == {key.name for key in task_keys()}


def test_each_section_of_a_key_begins_with_its_name() -> None:
    sections = yaml.safe_load(KEYS.read_text())
    for name in (
        "gpu_driver",
        "container_engine",
        "container_runtime",
        "kubelet",
        "kubernetes",
        "labels",
        "nccl",
        "ofed",
    ):
        assert all(key.startswith((f"{name}.", ".")) for key in sections[name])


@pytest.mark.parametrize(("key", "record"), [("container_engine", ContainerEngine), ("gpu_driver", GpuDriver)])
def test_each_part_of_a_key_is_described(key: str, record: type) -> None:
    known = section(key)
    assert [each.name for each in fields(record) if f"| `{key}.{each.name}` |" not in known] == []
