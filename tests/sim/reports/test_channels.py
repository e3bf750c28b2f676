"""Public reports about the numbers of channels, tried by their triggers."""

import errno
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from tests.sim.engine.one_nic import Node
from tests.sim.kernel import Kernel
from tests.sim.refusing import refusing
from tests.sim.two_nics import NAME0, PF0

MAC = "02:00:00:00:01:00"


def refused(tmp_path: Path, driver: str, with_rdma: bool) -> str:
    """What the agent says about channels that the driver refuses with EBUSY."""
    kernel = Kernel()
    kernel.add_nic(PF0, NAME0, MAC, driver=driver)
    if with_rdma:
        kernel.rdma.add(PF0, "rocep33s0", NAME0)
    kernel.fault = refusing(errno.EBUSY, "ethtool", "channels")
    result = Node(kernel, tmp_path / "originals.json").follow({"channels": {"combined": 1}})
    (outcome,) = (each for each in result.outcomes if each.change.kind == "channels")
    assert outcome.result == "failed"
    return f"{outcome.error} {outcome.remedy}"


def test_channels_that_rdma_holds_are_an_error_that_says_so(tmp_path: Path) -> None:
    assert "irdma" in refused(tmp_path, "ice", with_rdma=True)


def test_channels_that_something_else_holds_do_not_blame_rdma(tmp_path: Path) -> None:
    assert "irdma" not in refused(tmp_path, "ice", with_rdma=False)
    assert "irdma" not in refused(tmp_path, "igb", with_rdma=True)


@pytest.mark.parametrize(
    ("nic", "operation"),
    [
        pytest.param({"channels": {"combined": 1}}, "ethtool", id="amzn-drivers-240"),
        pytest.param({"mtu": 9000}, "set_link", id="cilium-35426"),
    ],
)
@pytest.mark.parametrize("xdp", [True, False])
def test_a_setting_that_a_driver_refuses_with_an_xdp_program_names_it(
    tmp_path: Path, nic: dict[str, Any], operation: str, xdp: bool
) -> None:
    kernel = Kernel()
    kernel.add_nic(PF0, NAME0, MAC)
    kernel.fault = refusing(errno.EINVAL, operation)
    (netdev,) = kernel.netdevs.values()
    netdev.link = evolve(netdev.link, xdp=xdp, up=True)
    result = Node(kernel, tmp_path / "originals.json").follow(nic)
    (outcome,) = (each for each in result.outcomes if each.result == "failed")
    assert ("XDP program" in outcome.remedy) is xdp
