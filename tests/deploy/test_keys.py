"""Each key of the inventory is described in docs/inventory/keys.yaml, from which its pages are made."""

from __future__ import annotations

import yaml

from handbook.spec import KEYS
from tasks.common.data import SPEC_KEYS, task_keys


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
