from contextlib import nullcontext
from typing import Any

import pytest
from pyinfra.api.exceptions import DeployError
from pyinfra.context import ctx_host, ctx_state

from tasks import addresses, node_spec
from tests.deploy.conftest import Node, state_of

GROUP = {
    "nics": [
        {
            "name": f"rail{rail}",
            "select": {"pci": f"0000:{rail:02x}:00.0"},
            "rail": rail,
            "addresses": [{"network": "10.{rail}.0.0/16"}],
        }
        for rail in range(2)
    ]
}


def check(hosts: dict[str, dict[str, Any]], name: str) -> None:
    """As the deploy does for one host of an inventory."""
    state = state_of(hosts.items(), GROUP)
    with ctx_state.use(state), ctx_host.use(state.inventory.get_host(name)):
        addresses.refuse_shared(node_spec.read())


def test_hosts_with_one_number_are_refused_by_naming_both_places() -> None:
    with pytest.raises(DeployError) as refused:
        check({"gpu-01": {"node_number": 1}, "gpu-02": {"node_number": 1}}, "gpu-02")
    assert [line.partition(";")[0] for line in str(refused.value).splitlines()] == [
        f"gpu-02.nics[{rail}].addresses[0] and gpu-01.nics[{rail}].addresses[0] are both 10.{rail}.0.1"
        for rail in range(2)
    ]


def test_hosts_whose_rails_are_one_entry_are_compared_rail_by_rail() -> None:
    select = {"vendor": "15b3", "each": True, "min": 2, "max": 2}
    nics = [{"name": "rail{index}", "select": select, "rail": 0, "addresses": [{"network": "10.{rail}.0.0/16"}]}]
    check({"gpu-01": {"nics": nics, "node_number": 1}, "gpu-02": {"nics": nics, "node_number": 2}}, "gpu-01")
    with pytest.raises(DeployError, match=r"are both 10\.1\.0\.1"):
        check({"gpu-01": {"nics": nics, "node_number": 1}, "gpu-02": {"node_number": 1}}, "gpu-02")


def test_a_given_address_may_not_be_another_host_s_derived_one() -> None:
    nic = {**GROUP["nics"][0], "addresses": ["10.0.0.1/16"]}
    with pytest.raises(DeployError, match=r"gpu-02.nics\[0\].addresses\[0\] and gpu-01.nics\[0\]"):
        check({"gpu-01": {"node_number": 1}, "gpu-02": {"nics": [nic]}}, "gpu-02")


def test_a_host_whose_own_data_is_wrong_does_not_stop_the_others() -> None:
    check({"gpu-01": {"node_number": 1}, "gpu-02": {"node_number": "1"}, "gpu-03": {}}, "gpu-01")


def test_a_host_without_addresses_looks_at_no_other() -> None:
    check({"gpu-01": {"nics": []}, "gpu-02": {"node_number": 1}, "gpu-03": {"node_number": 1}}, "gpu-01")


@pytest.mark.parametrize(("names", "refused"), [(("n1", "n1"), True), (("n1", "n2"), False), ((None, "gpu-01"), True)])
def test_two_hosts_of_a_cluster_are_not_one_node(names: tuple[str | None, str], refused: bool) -> None:
    data = {"nics": [], "kubernetes": {"server": "https://east:6443", "ca_file": "x"}}
    hosts: dict[str, Any] = {f"gpu-0{number}": {**data, "node_name": name} for number, name in enumerate(names, 1)}
    shared = r"gpu-01\.node_name and gpu-02\.node_name are both the Node"
    with pytest.raises(DeployError, match=shared) if refused else nullcontext():
        check(hosts, "gpu-01")


def test_nodes_of_two_clusters_may_have_the_same_names_and_addresses() -> None:
    hosts = {
        f"{site}-gpu-01": {
            "node_name": "gpu-01",
            "node_number": 1,
            "kubernetes": {"server": f"https://{site}:6443", "ca_file": "x"},
        }
        for site in ("east", "west")
    }
    check(hosts, "east-gpu-01")


@pytest.mark.parametrize(
    ("server", "warned"),
    [
        *(("10.1.0.1", True), ("10.1.255.254", True)),
        *(("10.2.0.1", False), ("kubernetes.example.net", False), ("[fd00::1]", False)),
    ],
)
def test_an_api_server_in_the_network_of_a_rail_is_a_warning(node: Node, server: str, warned: bool) -> None:
    node.data = {**GROUP, "node_number": 1, "kubernetes": {"server": f"https://{server}:6443", "ca_file": "ca.pem"}}
    said = " ".join(node.deploy(lambda: addresses.check(node_spec.read()), {}).log)
    assert (f"nics[1].addresses[0]: the API server {server} is in the network 10.1.0.0/16" in said) is warned
    assert ("API server" in said) is warned
