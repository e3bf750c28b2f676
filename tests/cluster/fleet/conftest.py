"""A control plane without kubelets, for the tests of the fleet's commands."""

from collections.abc import Iterator

import pytest

from lab.cluster.control_plane import ControlPlane
from tests.cluster.fleet.fleet_commands import ROOT
from tests.cluster.objects import LEASES
from tests.cluster.planes import running


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane for one module of tests, since a sweep reads all Nodes of a cluster."""
    with running(tmp_path_factory.mktemp("fleet")) as plane:
        plane.kubectl("apply", "-k", str(ROOT / "fleet" / "cluster"))
        yield plane


@pytest.fixture
def no_nodes(plane: ControlPlane) -> None:
    plane.kubectl("delete", "nodes", "--all")
    plane.kubectl("delete", "leases", "--all", LEASES)
