"""The worked example's eRDMA instances on the simulated kernel: with one port, or with a second that may stay DOWN."""

import pytest

from agent.report.records import Condition
from agent.report.verdict import is_ready
from group_data import erdma
from tests.sim.kernel import Kernel
from tests.sim.passes import settle, spec_of

PORTS = ("0000:05:00.0", "0000:06:00.0", "0000:07:00.0")


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def add(kernel: Kernel, *states: str) -> None:
    """One port for each state, as ibv_devinfo shows it, without a management device as on iWARP."""
    for index, state in enumerate(states):
        kernel.add_erdma(PORTS[index])
        kernel.rdma.add(PORTS[index], f"erdma_{index}", None, umad=False, node_type="4: RNIC")
        kernel.rdma.set_port(f"erdma_{index}", state=state)


def conditions(kernel: Kernel) -> dict[str, Condition]:
    """The node's conditions by the group's own spec; the simulated kernel has no GPUs."""
    spec = spec_of(*erdma.nics, rdma=erdma.rdma)
    return {each.type: each for each in settle(kernel, spec).conditions}


@pytest.mark.parametrize("states", [["4: ACTIVE"], ["4: ACTIVE", "4: ACTIVE"], ["4: ACTIVE", "1: DOWN"]])
def test_an_instance_with_one_or_two_ports_is_ready(kernel: Kernel, states: list[str]) -> None:
    add(kernel, *states)
    conditions_now = conditions(kernel)
    assert is_ready(list(conditions_now.values())), conditions_now
    if "1: DOWN" in states:
        assert "NIC erdma1: erdma_1 port 1" in conditions_now["RdmaPorts"].message


@pytest.mark.parametrize(
    ("states", "type", "reason"),
    [
        (["1: DOWN", "1: DOWN"], "RdmaPorts", "PortNotReady"),
        ([], "NicsPresent", "TooFewNics"),
        (["4: ACTIVE", "4: ACTIVE", "4: ACTIVE"], "NicsPresent", "TooManyNics"),
    ],
)
def test_without_a_port_that_works_or_with_more_than_there_may_be_it_is_not(
    kernel: Kernel, states: list[str], type: str, reason: str
) -> None:
    add(kernel, *states)
    conditions_now = conditions(kernel)
    assert not is_ready(list(conditions_now.values()))
    assert (conditions_now[type].status, conditions_now[type].reason) == ("False", reason)
