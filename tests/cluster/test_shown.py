"""The watch by which `python -m tests.chaos` judges what the API shows of a node."""

from agent.report.names import EFFECT, READY, TAINT
from lab.cluster.control_plane import ControlPlane
from lab.node import wait
from tests.chaos.shown import CLAIMS, Member, observed
from tests.cluster.objects import manifest, patch_status


def test_the_watch_sees_each_change_and_goes_on_after_an_outage(control_plane: ControlPlane) -> None:
    control_plane.apply(manifest("v1", "Node", "watched"))
    ready = {"status": {"conditions": [{"type": READY, "status": "True"}]}}
    patch_status(control_plane, "watched", ready, how="strategic")
    with observed(Member(control_plane, "watched")) as seen:
        control_plane.kubectl("taint", "node", "watched", f"{TAINT}:{EFFECT}")
        wait(lambda: seen[-1].claims == {CLAIMS[0]}, 60, "the taint")
        control_plane.kill_api_server()
        wait(lambda: seen[-1].claims == set(), 60, "the end of the watch")
        control_plane.start_api_server()
        wait(lambda: seen[-1].claims == {CLAIMS[0]}, 60, "the next watch")
    assert [each.at for each in seen] == sorted(each.at for each in seen)
    control_plane.kubectl("delete", "node", "watched")
