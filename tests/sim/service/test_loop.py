"""What the loop records, hands on and counts, beside the passes that it runs."""

import errno
import os
import threading
from pathlib import Path

import pytest

from agent.engine import retry
from agent.machine import Event
from agent.report.history import Entry
from agent.report.history import read as read_history
from agent.report.records import Disruption
from agent.service import loop, spec_in_force
from agent.service.activity import View
from agent.service.apply_socket import ask
from agent.service.spec_in_force import IN_FORCE
from agent.service.supervisor import REPEATED
from tests.contract.asking import soon
from tests.sim.kernel import no_fault
from tests.sim.passes import condition
from tests.sim.readiness import Node
from tests.sim.refusing import refusing
from tests.sim.service.running import Announced, Reload, Worker, both, one, sleeps, triggers
from tests.sim.two_nics import PF0, PF1
from tests.stand_ins import text_file

LATER = 600.0
"""Seconds after which something would happen by itself: after any of these tests."""


def mtus(folder: Path) -> list[Entry]:
    """The entries of the MTUs that were set."""
    entries = read_history(folder)
    return [e for e in entries if e.outcome.change.field == "mtu" and e.outcome.result == "applied"]


def test_a_disk_that_hangs_while_the_verified_spec_is_written_is_named(
    worker: Worker, view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(descriptor: int) -> None:
        if "verified" in str(Path(f"/proc/self/fd/{descriptor}").readlink()) and not goes_on.is_set():
            hangs.set()
            goes_on.wait(60.0)

    monkeypatch.setattr(os, "fsync", hang)
    out = worker(one(9000))
    assert hangs.wait(60.0)
    step = view.step()
    goes_on.set()
    assert step is not None
    assert (step.kind, step.mode, step.device, step.call) == ("records", "write", "", "write the verified spec")
    assert out.until(lambda report: report.ready)


def test_a_pass_that_tries_a_failed_change_again_is_a_retry(
    node: Node, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_RETRY", 0.05)
    node.kernel.fault = refusing(errno.EBUSY, "mtu=9000")
    out = worker(one(9000))
    out.until(lambda report: condition(report, "Converged").reason == "Failed")
    node.kernel.fault = no_fault
    assert out.until(lambda report: report.ready)
    recorded = soon(lambda: mtus(tmp_path) or None, "record of the try that succeeds", 60.0)
    assert recorded[-1].trigger == "retry"


def test_the_first_pass_of_a_worker_that_replaces_another_is_its_start(worker: Worker, tmp_path: Path) -> None:
    text_file(tmp_path / "run" / IN_FORCE, one(9000))
    worker(one(9000)).until(lambda report: report.ready)
    assert soon(lambda: triggers(tmp_path) or None, "record of the first pass", 60.0)[0] == "start"


def test_after_everything_was_read_again_the_worker_sleeps(
    node: Node, worker: Worker, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "RESYNC", 0.2)
    worker(one(9000)).until(lambda report: report.ready)
    node.kernel.netlink.set_link(node.kernel.netdev(PF0).ifindex, mtu=1500)
    soon(lambda: node.kernel.netdev(PF0).mtu == 9000 or None, "full pass", 60.0)
    monkeypatch.setattr(loop, "RESYNC", LATER)
    assert soon(lambda: sleeps(view), "wait for the next one", 30.0)


def test_the_devices_of_events_are_why_a_pass_was_run(
    node: Node, announced: Announced, worker: Worker, tmp_path: Path
) -> None:
    worker(both(9000)).until(lambda report: report.ready)
    before = len(soon(lambda: triggers(tmp_path) or None, "record of the first pass", 60.0))
    indexes = [node.kernel.netdev(pf).ifindex for pf in (PF0, PF1)]
    for index in indexes:
        node.kernel.netlink.set_link(index, mtu=1500)
    announced.waiting += [Event(ifindex=index) for index in indexes]
    os.eventfd_write(announced.descriptor, 1)
    repairs = soon(lambda: triggers(tmp_path)[before:] or None, "record of the repairs", 45.0)
    assert set(repairs) == {f"event {PF0}#pf {PF1}#pf"}


def test_a_new_spec_that_fails_is_given_up_when_its_trial_ends_although_nothing_is_tried_again(
    node: Node, worker: Worker, reload: Reload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_RETRY", LATER)
    monkeypatch.setattr(loop, "RESYNC", LATER)
    monkeypatch.setattr(spec_in_force, "TRIAL", 0.1)
    out = worker(both(9000))
    before = out.until(lambda report: report.ready)
    node.kernel.fault = refusing(errno.EINVAL, f"set_link {node.kernel.netdev(PF1).name} mtu=2000")
    reload(both(4000).replace('"mtu": 9000', '"mtu": 2000'))
    given_up = out.until(lambda report: report.ready and not report.up_to_date)
    assert given_up.spec_hash == before.spec_hash
    assert node.kernel.netdev(PF0).mtu == 9000
    back = soon(
        lambda: [entry for entry in mtus(tmp_path) if entry.outcome.change.before == 4000] or None, "the way back", 60.0
    )
    assert [(entry.trigger, entry.outcome.change.after) for entry in back] == [("spec", 9000)]


def test_a_spec_is_given_up_after_as_many_passes_that_crash_as_are_allowed(
    node: Node, worker: Worker, reload: Reload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(loop, "RESYNC", 0.2)
    crashes = []

    def crash(operation: str, where: str, value: str) -> None:
        if "mtu=4000" in value:
            crashes.append(where)
            raise KeyError(where)

    out = worker(one(9000))
    before = out.until(lambda report: report.ready)
    node.kernel.fault = crash
    for times in (1, 2):  # a spec that is asked for again is tried as often again
        reload(one(4000))
        given_up = out.until(lambda report: report.ready and not report.up_to_date)
        assert given_up.spec_hash == before.spec_hash
        assert any("KeyError" in condition.message for condition in given_up.conditions)
        node.kernel.netlink.set_link(node.kernel.netdev(PF0).ifindex, mtu=2000)
        soon(lambda: node.kernel.netdev(PF0).mtu == 9000 or None, "a full pass, which does not try it again", 60.0)
        assert len(crashes) == times * REPEATED


def test_without_a_usable_spec_the_node_says_so_until_there_is_one(worker: Worker, reload: Reload) -> None:
    out = worker("nonsense")
    report = out.until(lambda report: True)
    assert not report.ready
    assert condition(report, "Converged").reason == "NoSpec"
    assert report.refusal
    reload(one(9000))
    assert out.until(lambda report: report.ready)


def test_while_a_new_spec_waits_for_users_the_node_is_judged_by_the_spec_before(
    node: Node, worker: Worker, reload: Reload
) -> None:
    node.kernel.files.write(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs", "2")
    out = worker(one(9000, vfs={"count": 2}))
    before = out.until(lambda report: report.ready)
    reload(one(9000, vfs={"count": 3}, disruption={"allow": "none"}))
    waits = out.until(lambda report: report.spec_hash != before.spec_hash and bool(report.outcomes))
    assert waits.ready
    assert not waits.up_to_date


def test_a_client_has_only_the_change_made_that_it_names(node: Node, worker: Worker, tmp_path: Path) -> None:
    for pf in (PF0, PF1):
        node.kernel.files.write(f"/sys/bus/pci/devices/{pf}/sriov_numvfs", "2")
    out = worker(both(9000).replace('"mtu": 9000', '"mtu": 9000, "vfs": {"count": 3}, "disruption": {"allow": "none"}'))
    out.until(lambda report: not report.ready and bool(report.outcomes))
    client = ask(tmp_path / "apply.sock", Disruption.VF_RESET, 60.0, "b")
    result = next(each for each in client if any(outcome.result == "applied" for outcome in each.outcomes))
    assert {nic.pci for nic in result.nics} == {PF0, PF1}
    assert [node.kernel.files.read(f"/sys/bus/pci/devices/{pf}/sriov_numvfs") for pf in (PF0, PF1)] == ["2", "3"]
    soon(lambda: triggers(tmp_path)[-1] == "apply" or None, "history")
