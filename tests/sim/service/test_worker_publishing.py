"""When the worker publishes the result of a pass: at once, after its probes, or not at all since devices have changed."""

import errno
import json
import os
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from agent.engine import retry
from agent.machine import Event
from agent.report.history import read as read_history
from agent.service import inbox, loop, spec_in_force, wake
from agent.service import loop as loop_module
from agent.service.activity import View
from agent.service.apply_socket import Progress, ask
from agent.spec.node import PROBES
from tests.contract.asking import soon
from tests.sim.passes import condition, nic
from tests.sim.readiness import Node, writer
from tests.sim.refusing import refusing
from tests.sim.service.running import STUCK, Announced, Endless, Reload, Worker, both, disturb, lower_mtu, one
from tests.sim.two_nics import PF0, PF1

NEVER = 10**9

OFF = {name: {"severity": "off"} for name in PROBES}
"""The settings of all probes."""

OPTIONAL = json.dumps({"node_name": "n1", "nics": [nic("a", PF0, mtu=9000), nic("b", PF1, mtu=9000, required=False)]})


def results(folder: Path) -> list[Progress]:
    """Those of twenty passes, published or not, as a client receives them."""
    soon((folder / "apply.sock").exists, "socket", 60.0)
    return list(islice(ask(folder / "apply.sock", None, 60.0), 20))


@pytest.mark.parametrize("required", [False, True])
def test_while_events_wait_ready_is_postponed_or_if_one_of_a_required_nic_is_overdue_not_published(
    node: Node, announced: Announced, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: bool
) -> None:
    """The latter however often it was postponed."""
    monkeypatch.setattr(loop_module, "POSTPONED", 0 if required else NEVER)
    if required:
        monkeypatch.setattr(inbox, "ANSWERED_WITHIN", 0.0)
    monkeypatch.setattr(wake, "BURST", NEVER)
    disturb(node, announced, PF0 if required else PF1)
    out = worker(OPTIONAL)
    assert results(tmp_path)[-1].ready
    assert not any(message.get("ready") for message in out.said)


def test_endless_events_postpone_ready_only_so_often(node: Node, announced: Announced, worker: Worker) -> None:
    disturb(node, announced, PF1)
    assert worker(OPTIONAL).until(lambda report: report.ready)


def test_a_result_that_is_not_ready_is_published_although_events_wait(
    node: Node, announced: Announced, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "POSTPONED", NEVER)
    node.kernel.unreadable.add(f"/sys/bus/pci/devices/{PF0}/numa_node")
    disturb(node, announced, PF1)
    worker(OPTIONAL).until(lambda report: condition(report, "NicsPresent").reason == "DeviceUnreadable")


def test_while_a_nic_cannot_be_read_the_devices_are_unknown(node: Node, worker: Worker, tmp_path: Path) -> None:
    """Other ones would have the device plugins started again."""
    out = worker(OPTIONAL)
    before = out.until(lambda report: report.ready).devices
    node.kernel.unreadable.add(f"/sys/bus/pci/devices/{PF1}/numa_node")
    for _ in ask(tmp_path / "apply.sock", None, 60.0):
        break
    unread = out.until(lambda report: condition(report, "NicsPresent").reason == "DeviceUnreadable")
    assert (unread.ready, bool(before), unread.devices) == (True, True, "")
    node.kernel.unreadable.clear()
    assert out.until(lambda report: condition(report, "NicsPresent").status == "True").devices == before


def test_without_probes_the_first_report_waits_for_nothing(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    # Everything is read again, and a result is published at the latest then, after this test.
    monkeypatch.setattr(loop, "RESYNC", 600.0)
    monkeypatch.setattr(loop_module, "PROBES_WAIT", 600.0)
    assert worker(json.dumps({"node_name": "n1", "readiness": {"probes": OFF}})).until(lambda report: True)


def test_a_probe_may_answer_after_a_pass_that_ended_early(
    node: Node, worker: Worker, fifo: Path, tmp_path: Path
) -> None:
    node.kernel.pipes[STUCK] = str(fifo)
    out = worker('{"node_name": "n1", "readiness": {"probes": {"kernel_modules": {"severity": "required"}}}}')
    with writer(fifo):
        out.until(lambda report: condition(report, "KernelModules").reason == "NotYetRead")
        node.kernel.unreadable.add("/sys/devices/system/cpu/online")
        for _ in ask(tmp_path / "apply.sock", None, 60.0):
            break
        out.until(lambda report: condition(report, "Converged").reason == "DeviceLost")
        del node.kernel.pipes[STUCK]
    node.kernel.unreadable.clear()
    assert out.until(lambda report: report.ready)


def test_a_read_that_hangs_while_a_new_spec_is_checked_is_named(
    node: Node, worker: Worker, reload: Reload, view: View, fifo: Path
) -> None:
    path = f"/sys/bus/pci/devices/{PF0}/numa_node"
    out = worker(one(9000)).ready()
    node.kernel.pipes[path] = str(fifo)
    reload(one(4000))
    with writer(fifo) as file:
        step = soon(view.step, "hanging read", 60.0)
        del node.kernel.pipes[path]
        file.write("0\n")
    assert (step.kind, step.mode, step.device) == ("plan", "read", PF0)
    assert out.until(lambda report: report.ready and report.up_to_date)


def kept(file: Path) -> str:
    """The text of a file that a worker may remove meanwhile; empty if it is gone."""
    with suppress(FileNotFoundError):
        return file.read_text()
    return ""


def test_what_failed_before_a_new_spec_came_ends_the_trial_of_that_without_giving_it_up(
    node: Node, worker: Worker, reload: Reload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec_in_force, "TRIAL", 0.1)
    (tmp_path / "run").mkdir()
    (tmp_path / "state").mkdir()
    known = tmp_path / "run" / spec_in_force.STATE
    out = worker(both(9000)).ready()
    second = node.kernel.netdev(PF1)
    node.kernel.netlink.set_link(second.ifindex, mtu=1500)
    node.kernel.fault = refusing(errno.EBUSY, f"set_link {second.name} ")
    for _ in ask(tmp_path / "apply.sock", None, 60.0):
        break
    out.until(lambda report: condition(report, "Converged").reason == "Failed")
    reload(both(4000))
    soon(lambda: node.kernel.netdev(PF0).mtu == 4000 or None, "new spec", 60.0)
    soon(lambda: not kept(known) or "given up" in kept(known) or None, "end of its trial", 60.0)
    assert not known.exists()


def test_an_event_does_not_have_another_devices_failed_change_tried_again(
    node: Node, announced: Announced, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_RETRY", 600.0)
    monkeypatch.setattr(retry, "HASTENED_RETRY", 0.0)
    tried = []

    def refuse(operation: str, where: str, value: str) -> OSError | None:
        if "txqueuelen=" not in value:
            return None
        tried.append(where)
        return OSError(errno.EBUSY, "busy")

    for pf in (PF0, PF1):
        node.kernel.netlink.set_link(node.kernel.netdev(pf).ifindex, mtu=9000)
    node.kernel.fault = refuse
    disturb(node, announced, PF1)
    # A change of txqueuelen disturbs nobody. So an event of the first NIC would have it tried again soon.
    worker(OPTIONAL.replace('"mtu": 9000', '"mtu": 9000, "txqueuelen": 500', 1))
    soon(lambda: tried or None, "first try", 60.0)
    assert results(tmp_path)
    # One more, since a client has everything tried.
    assert len(tried) <= 2


def test_once_ready_was_postponed_often_enough_it_is_published_although_an_event_waits(
    node: Node, announced: Announced, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "POSTPONED", 0)
    disturb(node, announced, PF1)
    # No probe's answer is waited for, and the next pass would have nothing to change.
    spec = json.dumps({**json.loads(OPTIONAL), "readiness": {"probes": OFF}})
    assert worker(spec).until(lambda report: report.ready).outcomes


def test_a_published_result_ends_the_row_of_postponed_ones(
    node: Node, announced: Announced, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "POSTPONED", 1)
    index = node.kernel.netdev(PF0).ifindex
    node.kernel.events = Endless(announced.descriptor, Event(ifindex=index))
    out = worker(one(9000)).ready()
    before = len(out.said)
    made = soon(lambda: len(list(read_history(tmp_path))) or None, "record of the first pass", 60.0)
    node.kernel.netlink.set_link(index, mtu=1500)
    os.eventfd_write(announced.descriptor, 1)
    soon(lambda: len(list(read_history(tmp_path))) > made or None, "record of the repair", 45.0)
    assert not any(message.get("ready") and message["outcomes"] for message in out.said[before:])


def test_a_repair_after_the_same_spec_was_read_again_is_not_the_specs(
    node: Node, worker: Worker, reload: Reload, tmp_path: Path
) -> None:
    worker(one(9000)).until(lambda report: report.ready)
    made = soon(lambda: len(list(read_history(tmp_path))) or None, "record of the first pass", 60.0)
    node.kernel.netlink.set_link(node.kernel.netdev(PF0).ifindex, mtu=1500)
    reload(one(9000))
    repairs = soon(lambda: list(read_history(tmp_path))[made:] or None, "record of the repair", 45.0)
    assert {repair.trigger for repair in repairs} == {"resync"}


def test_a_nic_that_is_about_to_be_changed_is_not_ready_and_the_others_are(
    node: Node, announced: Announced, worker: Worker
) -> None:
    out = worker(both(9000)).ready()
    lower_mtu(node, announced)
    report = out.until(lambda report: bool(report.announcement))
    assert [(nic.name, nic.ready, nic.reason) for nic in report.nics] == [("a", False, "Converging"), ("b", True, "")]
    assert all(nic.ready for nic in out.until(lambda report: report.ready).nics)
