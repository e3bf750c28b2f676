"""Public reports about the drivers to which VFs are bound."""

import errno
from pathlib import Path
from typing import Any

import pytest

from agent.kinds.bindings import DRIVERS_PROBE
from agent.service.messages import of_pass
from agent.service.spec_in_force import SpecInForce
from tests.sim.engine.one_nic import Node, is_settled, vf
from tests.sim.kernel import no_fault
from tests.sim.refusing import refusing
from tests.sim.two_nics import NAME0


def test_a_vf_can_go_from_vfio_to_its_network_driver_without_new_vfs(node: Node) -> None:
    """sriov-network-operator 244: the number of VFs is the same."""
    assert is_settled(node.follow({"vfs": {"count": 2, "defaults": {"driver": "vfio-pci"}}}))
    node.kernel.writes.clear()
    assert is_settled(node.follow({"vfs": {"count": 2, "defaults": {"driver": "netdevice"}}}))
    assert node.kernel.netdev(vf(node, 1)).name == f"{NAME0}v1"
    assert not [path for path, _ in node.kernel.writes if path.endswith("sriov_numvfs")]


def test_a_vf_goes_to_vfio_and_back_however_it_came_there(node: Node) -> None:
    """It has vfio-pci already, by the IDs that somebody gave that driver (nasty 601)."""
    node.follow({"vfs": {"count": 1}})
    function = vf(node, 0)
    node.kernel.unbind(function)
    node.kernel.set_driver(function, "vfio-pci")
    node.kernel.writes.clear()
    assert is_settled(node.follow({"vfs": {"count": 1, "defaults": {"driver": "vfio-pci"}}}))
    assert [where for where, _ in node.kernel.writes if where.endswith(("bind", "driver_override", "new_id"))] == []
    assert is_settled(node.follow({"vfs": {"count": 1, "defaults": {"driver": "netdevice"}}}))
    assert node.kernel.driver(function) == "igbvf"


@pytest.mark.parametrize(
    ("driver", "override"),
    [
        # A pod with a virtual machine could not be created.
        pytest.param("vfio-pci", "vfio-pci", id="kata-containers-13790"),
        # The VF was unbound from its network driver, and vfio-pci did not bind to it.
        pytest.param(None, "vfio-pci", id="dra-driver-nvidia-gpu-1255"),
        pytest.param(None, "(null)", id="dra-driver-nvidia-gpu-1256"),
    ],
)
def test_a_vf_that_a_failed_pod_has_left_without_its_network_driver_has_it_again(
    node: Node, driver: str | None, override: str
) -> None:
    nic = {"vfs": {"count": 2, "defaults": {"driver": "netdevice"}}}
    assert is_settled(node.follow(nic))
    function = vf(node, 1)
    node.kernel.unbind(function)
    if driver is not None:
        node.kernel.set_driver(function, driver)
    node.kernel.tree.put(f"/sys/bus/pci/devices/{function}/driver_override", override)
    assert is_settled(node.follow(nic))
    assert (node.kernel.driver(function), node.kernel.netdev(function).name) == ("igbvf", f"{NAME0}v1")
    assert node.kernel.files.read(f"/sys/bus/pci/devices/{function}/driver_override") == "(null)"


def test_no_vf_is_bound_before_it_is_configured(node: Node) -> None:
    """To bind each of many VFs, and to unbind it again for its address, takes minutes."""
    node.follow({})
    node.kernel.writes.clear()
    assert is_settled(node.follow({"vfs": {"count": 4}}))
    written = [(where.rpartition("/")[2], value) for where, value in node.kernel.writes]
    made, probed = written.index(("sriov_numvfs", "4")), written.index(("sriov_drivers_autoprobe", "1"))
    assert written.index(("sriov_drivers_autoprobe", "0")) < made < probed
    addresses = [place for place, (_, value) in enumerate(written) if "mac" in value]
    assert len(addresses) == 4
    assert all(made < place < probed for place in addresses)
    assert not [where for where, _ in written if where == "unbind"]


def test_a_plugin_that_saw_a_vf_without_its_driver_is_started_again(node: Node, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"vfs": {"count": 4, "defaults": {"driver": "vfio-pci"}}}

    in_force = SpecInForce(tmp_path, tmp_path)

    def devices() -> str:
        return of_pass(node.follow(spec), in_force, 0.0).devices

    whole = devices()
    node.kernel.unbind(vf(node, 1))
    node.kernel.fault = refusing(errno.EBUSY, DRIVERS_PROBE)
    without = devices()
    node.kernel.fault = no_fault
    assert devices() == whole != without
    # The plugin's resources are chosen by the driver, too.
    spec["vfs"]["defaults"]["driver"] = "netdevice"
    assert devices() not in (whole, without)
