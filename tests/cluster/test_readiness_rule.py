"""node-readiness-controller sets and lifts the taint: the real program with Trackbed's rule and a real API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.report.names import TAINT
from agent.reporter.settings import Settings
from lab import LabError
from lab.cluster import programs
from lab.cluster.control_plane import ControlPlane
from lab.cluster.daemon import Daemon
from lab.go import go_programs
from tests.cluster.reporter.reporters import Reporter, by_token, node, prepare, until

RULE = Path(__file__).parent.parent.parent / "fleet" / "cluster-readiness-rule"
CRD = "config/crd/bases/readiness.node.x-k8s.io_nodereadinessrules.yaml"

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane with that controller and our rule."""
    try:
        module = go_programs.source(programs.READINESS_CONTROLLER_MODULE, programs.READINESS_CONTROLLER)
        program = go_programs.ensure(programs.READINESS_CONTROLLER) / "cmd"
    except LabError as error:
        pytest.skip(f"{programs.READINESS_CONTROLLER.name} cannot be built here: {error.what}")
    prepare(control_plane)
    control_plane.kubectl("apply", "-f", str(module / CRD))
    control_plane.kubectl("wait", "--for=condition=Established", "-f", str(module / CRD))
    control_plane.kubectl("apply", "-k", str(RULE))
    controller = Daemon("node-readiness-controller", control_plane.folder)
    controller.start([program, f"--kubeconfig={control_plane.admin}", "--health-probe-bind-address=0"])
    try:
        yield control_plane
        # The rule goes when the controller has taken its taints back.
        control_plane.kubectl("delete", "-k", str(RULE))
    finally:
        controller.stop()


def start(plane: ControlPlane, folder: Path, name: str) -> Reporter:
    """The reporter of a Node that its kubelet has registered with the taint."""
    registered = node(name)
    registered["spec"]["taints"].append({"key": TAINT, "effect": "NoSchedule"})
    plane.apply(registered)
    authority = str(plane.authority.pair.certificate)
    settings = Settings(name, plane.url, authority, taint_lifted_by="node-readiness-controller")
    return Reporter.start(plane, folder, settings, by_token(plane, name))


def test_the_controller_lifts_the_taint_by_our_condition_and_sets_it_again(plane: ControlPlane, tmp_path: Path) -> None:
    reporter = start(plane, tmp_path, "ruled")
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the controller lifts the taint")
    reporter.acknowledged(reporter.say(False))
    until(reporter.is_tainted, "the controller sets the taint")
    reporter.acknowledged(reporter.say(True))
    until(lambda: not reporter.is_tainted(), "the controller lifts the taint again")
    assert not [event for event in reporter.writes() if "taints" in str(event.get("requestObject"))]
