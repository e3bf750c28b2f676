"""What the worker's loop does with events, probes and clients that come between its passes and during them."""

import errno
import json
import time
from itertools import islice
from pathlib import Path

import pytest

from agent.engine import retry
from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.hardware.functions import vf_addresses
from agent.machine import Event
from agent.service import loop, spec_in_force, wake
from agent.service import loop as loop_module
from agent.service.activity import View
from agent.service.apply_socket import ask
from agent.spec.node import from_mapping
from tests.contract.asking import soon
from tests.sim.kernel import no_fault
from tests.sim.passes import condition
from tests.sim.readiness import Node, writer
from tests.sim.service.running import STUCK, Announced, Reload, Worker, both, disturb, lower_mtu, one, sleeps, triggers
from tests.sim.two_nics import MAC1, NAME0, NAME1, PF0, PF1

TWO = both(9000)

BEFORE_A_RESYNC = 45.0
"""Seconds. After a minute everything is read again, whether an event has come or not."""


def entries(folder: Path) -> list[str]:
    """Why the passes that have changed something were run."""
    each = triggers(folder)
    return [trigger for trigger, before in zip(each, ["", *each], strict=False) if trigger != before]


def test_after_a_burst_of_events_passes_come_at_a_limited_rate(
    node: Node, announced: Announced, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake, "BURST", 2)
    monkeypatch.setattr(wake, "RATE", 10.0)
    disturb(node, announced, PF0)
    worker(one(9000)).until(lambda report: report.ready)
    # A client receives the result of each pass, and another one if probes have answered meanwhile.
    began = time.monotonic()
    assert len(list(islice(ask(tmp_path / "apply.sock", None, 60.0), 30))) == 30
    assert time.monotonic() - began > (30 / 2 - 3) / 10.0


def test_after_an_event_only_its_device_is_read(
    node: Node, announced: Announced, worker: Worker, tmp_path: Path
) -> None:
    kernel = node.kernel
    worker(TWO).until(lambda report: report.ready)
    for pf in (PF0, PF1):  # PF0's drift sends no event
        kernel.netlink.set_link(kernel.netdev(pf).ifindex, mtu=1500)
    announced.announce(Event(ifindex=kernel.netdev(PF1).ifindex))
    soon(lambda: kernel.netdev(PF1).mtu == 9000 or None, "repair", BEFORE_A_RESYNC)
    assert kernel.netdev(PF0).mtu == 1500
    why = soon(lambda: repairs if len(repairs := entries(tmp_path)) > 1 else None, "record of it", BEFORE_A_RESYNC)
    assert why == ["spec", f"event {PF1}#pf"]


def test_everything_is_read_again_in_time_although_events_of_one_device_never_end(
    node: Node, announced: Announced, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "RESYNC", 1.0)
    kernel = node.kernel
    disturb(node, announced, PF1)
    worker(TWO).until(lambda report: report.ready)
    soon(lambda: entries(tmp_path) or None, "record of the first pass", 60.0)
    kernel.netlink.set_link(kernel.netdev(PF0).ifindex, mtu=1500)
    soon(lambda: kernel.netdev(PF0).mtu == 9000 or None, "repair of what sent no event", 60.0)
    soon(lambda: entries(tmp_path)[-1] == "resync" or None, "record of the repair", 60.0)


def test_an_event_of_the_first_pass_about_a_device_that_is_not_known_yet_is_not_lost(
    node: Node, announced: Announced, worker: Worker
) -> None:
    kernel = node.kernel
    other = kernel.netdev(PF1).ifindex
    # Nothing but PF0's MTU has to be written, so nothing else has PF1 read again.
    converge(kernel.machine(), Goal(from_mapping(json.loads(TWO))), Memory(time.monotonic))
    kernel.netlink.set_link(kernel.netdev(PF0).ifindex, mtu=1500)

    def drift(operation: str, where: str, value: str) -> None:
        if "9000" in value:
            kernel.fault = no_fault
            # PF1 was read already, and needed no change.
            kernel.netlink.set_link(other, mtu=1500)
            announced.announce(Event(ifindex=other))
            soon(lambda: not announced.waiting or None, "somebody who takes the event during the write", 60.0)

    kernel.fault = drift
    out = worker(TWO)
    soon(lambda: kernel.fault is no_fault or None, "write", 60.0)
    soon(lambda: kernel.netdev(PF1).mtu == 9000 or None, "repair", BEFORE_A_RESYNC)
    assert "PassCrashed" not in json.dumps(out.said)


def test_an_event_about_a_netdev_that_was_made_again_since_the_last_pass_is_not_lost(
    node: Node, announced: Announced, worker: Worker
) -> None:
    kernel = node.kernel

    def drift(pf: str) -> None:
        kernel.netlink.set_link(kernel.netdev(pf).ifindex, mtu=1500)
        announced.announce(Event(ifindex=kernel.netdev(pf).ifindex))

    def repaired(operation: str, where: str, value: str) -> None:
        # The next round repairs PF0 and reads PF1, and the one after it reads only PF0.
        if (where, value) == (NAME1, "mtu=9000 up=None"):
            kernel.fault = repaired_later
            drift(PF0)

    def repaired_later(operation: str, where: str, value: str) -> None:
        if (where, value) == (NAME0, "mtu=9000 up=None"):
            kernel.fault = no_fault
            drift(PF1)

    off = {"irqs": {"irqbalance": "untouched", "pin": False}, "rps": {"enable": False}, "xps": {"enable": False}}
    worker(json.dumps({**json.loads(TWO), **off})).until(lambda report: report.ready)
    kernel.unbind(PF1)
    kernel.bind(PF1, NAME1, MAC1)
    kernel.fault = repaired
    announced.announce(Event(function=PF1))
    soon(lambda: kernel.fault is no_fault or None, "write", BEFORE_A_RESYNC)
    soon(lambda: kernel.netdev(PF1).mtu == 9000 or None, "repair", BEFORE_A_RESYNC)


def test_an_event_that_a_pass_turns_out_to_have_answered_waits_no_longer(
    node: Node, announced: Announced, worker: Worker, view: View, fifo: Path
) -> None:
    """A pod takes a VF's netdev while a pass reads the PF. The pass does not find the index of which the event speaks."""
    kernel, count = node.kernel, f"/sys/bus/pci/devices/{PF0}/sriov_numvfs"
    worker(one(9000, vfs={"count": 1})).until(lambda report: report.ready)
    soon(lambda: sleeps(view), "sleep", 60.0)
    kernel.pipes[count] = str(fifo)
    announced.announce(Event(function=PF0))
    with writer(fifo) as file:
        soon(view.step, "reading", 60.0)
        vf = vf_addresses(kernel.files, PF0)[0]
        index = kernel.netdev(vf).ifindex
        kernel.move_away(vf)
        announced.announce(Event(ifindex=index))
        soon(lambda: not announced.waiting or None, "somebody who takes the event during the pass", 60.0)
        del kernel.pipes[count]
        file.write("1\n")
    soon(lambda: not view.waits() or None, "answer", BEFORE_A_RESYNC)


def test_after_an_event_outside_the_spec_the_worker_sleeps(announced: Announced, worker: Worker, view: View) -> None:
    worker(one(9000)).until(lambda report: report.ready)
    soon(lambda: sleeps(view), "sleep before it", 60.0)
    before = view.last()
    announced.announce(Event(ifindex=99, netdev="other"))
    soon(lambda: view.last() > before or None, "reading of the event", 60.0)
    soon(lambda: sleeps(view), "sleep after it", BEFORE_A_RESYNC)


def test_while_passes_under_a_new_spec_end_early_the_worker_sleeps_between_them(
    node: Node, worker: Worker, reload: Reload, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(operation: str, where: str, value: str) -> None:
        if "mtu=4000" in value:
            node.kernel.unreadable.add("/sys/devices/system/cpu/online")
            raise OSError(errno.EIO, "Input/output error")

    # The end of the trial is the reason for the first pass that ends early.
    monkeypatch.setattr(retry, "FIRST_RETRY", 3600.0)
    monkeypatch.setattr(spec_in_force, "TRIAL", 3.0)
    out = worker(one(9000)).ready()
    node.kernel.fault = fail
    reload(one(4000))
    out.until(lambda report: condition(report, "Converged").reason == "DeviceLost")
    soon(lambda: sleeps(view), "sleep after it", BEFORE_A_RESYNC)


def test_the_first_report_has_the_answers_of_quick_probes(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "PROBES_WAIT", 600.0)
    first = worker('{"node_name": "n1"}').until(lambda report: True)
    assert "NotYetRead" not in {condition.reason for condition in first.conditions}


def test_a_result_does_not_wait_for_probes_that_have_answered(
    node: Node, announced: Announced, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "PROBES_WAIT", 600.0)
    out = worker(one(9000)).ready()
    lower_mtu(node, announced)
    soon(lambda: out.said[-1].get("outcomes") or None, "report of the repair", BEFORE_A_RESYNC)


def test_a_client_of_apply_sees_what_a_probe_answers_after_the_pass(
    node: Node, worker: Worker, fifo: Path, tmp_path: Path
) -> None:
    node.kernel.pipes[STUCK] = str(fifo)
    out = worker(
        '{"node_name": "n1", "readiness": {"probes": {"kernel_modules": {"severity": "required", "deadline": 3}}}}'
    )
    with writer(fifo):
        out.until(lambda report: True)
        reasons: list[str] = []
        for result in ask(tmp_path / "apply.sock", None, 60.0):
            reasons += [each.reason for each in result.conditions if each.type == "KernelModules"]
            if reasons[-1] == "ProbeTimedOut":
                break
        assert reasons[-1] == "ProbeTimedOut"
        del node.kernel.pipes[STUCK]
