"""The docs name the manifests that are rendered."""

import re

import yaml

from agent.spec.node import from_mapping
from tasks.common import archive
from tasks.kubernetes.manifests import test_pods
from tasks.kubernetes.manifests.device_plugins import ERDMA_FORMS, DevicePlugins, Networks
from tasks.kubernetes.manifests.discovered import discover
from tasks.kubernetes.manifests.rendered import manifests
from tests.deploy.hardware import RAIL0, SELECTED, hardware


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    text = (archive.ROOT / "docs" / page).read_text()
    (section,) = re.findall(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.strip("|").split(" | ") for line in lines[2:]]


def test_each_erdma_form_stands_with_its_image_and_resource() -> None:
    documented = {row[0].strip(' `"'): row for row in rows("inventory/device-plugins.md", "eRDMA as a resource")}
    assert set(documented) == set(ERDMA_FORMS)
    for name, form in ERDMA_FORMS.items():
        assert f"`{form.resource}`" in documented[name][3]
        assert (form.image or "nothing").rpartition("acs/")[2] in documented[name][2]


def test_each_file_of_test_pods_is_listed() -> None:
    documented = {row[0].strip(" `") for row in rows("rdma-in-pods.md", "The pods")}
    assert documented == {f"{name}-pods.yaml" for name in test_pods.NAMES}


def test_each_kind_of_network_is_listed() -> None:
    kinds = {row[0].strip(" `").rpartition("-")[0] for row in rows("inventory/device-plugins.md", "Networks for pods")}
    wanted = DevicePlugins("made", networks=Networks("10.56.217.0/24"))
    node = discover(hardware(RAIL0), from_mapping({"node_name": "a"}), SELECTED)
    made = yaml.safe_load_all(manifests(wanted, {"a": node})["networks.yaml"])
    names = {each["metadata"]["name"] for each in made}
    assert len(names) == len(kinds)
    assert {kind for kind in kinds for name in names if name.startswith(f"{kind}-")} == kinds
