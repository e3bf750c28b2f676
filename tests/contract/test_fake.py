"""The cases on the fake; tests/lab runs them on a node's real kernel."""

import pytest

from tests.contract.cases import CASES, Case
from tests.sim.kernel import Kernel

PF = "0000:21:00.0"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_fake_behaves_as_the_kernel(case: Case) -> None:
    kernel = Kernel()
    kernel.rdma.rxe = True
    kernel.add_nic(PF, "enp33s0", "52:54:00:aa:00:01")
    kernel.load_vfio()
    case(kernel.machine(), PF)
