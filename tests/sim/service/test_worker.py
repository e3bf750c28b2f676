"""The messages of the worker's loop on the simulated kernel."""

import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from queue import Queue

import pytest

from agent.kinds import by_name, other_writers
from agent.machine import Event
from agent.report import drift
from agent.report.drift import Drift, read_drift
from agent.report.history import read as read_history
from agent.service import loop, pass_log
from agent.service.activity import Step, View
from agent.service.spec_in_force import VERIFIED
from tests.contract.asking import soon
from tests.journald import heard, listening
from tests.sim.kernel import no_fault
from tests.sim.kernel.files import SimFiles
from tests.sim.passes import condition
from tests.sim.readiness import Node, writer
from tests.sim.service.running import STUCK, Announced, Reload, Worker, both, lower_mtu, one, triggers
from tests.sim.two_nics import PF0, PF1


def test_the_node_is_ready_once_all_probes_have_answered(worker: Worker) -> None:
    out = worker('{"node_name": "n1", "readiness": {"probes": {"pcie_link": {"severity": "required"}}}}')
    assert condition(out.until(lambda report: report.ready), "PcieLink").status == "True"


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_an_unreadable_file_of_no_device_is_reported_and_read_again(node: Node, worker: Worker, mode: str) -> None:
    """In mode observe it leaves the node ready, which may be in service: an agent that only looks must not take that away."""
    node.kernel.unreadable.add("/sys/devices/system/cpu/online")
    out = worker(json.dumps({"node_name": "n1", "mode": mode}))
    assert out.until(lambda report: condition(report, "Converged").reason == "DeviceLost").ready is (mode == "observe")
    node.kernel.unreadable.clear()
    assert out.until(lambda report: condition(report, "Converged").status == "True").ready


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_only_a_spec_that_the_agent_enforces_is_verified(worker: Worker, tmp_path: Path, mode: str) -> None:
    """In mode observe every node counts as ready, whatever it is like."""
    (tmp_path / "state").mkdir()
    assert worker(json.dumps({"node_name": "n1", "mode": mode})).until(lambda report: report.ready)
    assert (tmp_path / "state" / VERIFIED).exists() is (mode == "enforce")


def test_while_a_probe_hangs_the_others_are_reported_and_then_its_timeout(
    node: Node, worker: Worker, view: View, fifo: Path
) -> None:
    node.kernel.pipes[STUCK] = str(fifo)
    out = worker(
        '{"node_name": "n1", "readiness": {"probes": {"kernel_modules": {"severity": "required", "deadline": 2}}}}'
    )
    with writer(fifo):
        report = out.until(lambda report: condition(report, "PcieLink").status == "True")
        assert condition(report, "ClockSynchronised").status == "True"
        # On a busy machine its two seconds may be over already.
        assert condition(report, "KernelModules").reason in ("NotYetRead", "ProbeTimedOut")
        if condition(report, "KernelModules").reason == "NotYetRead":
            report = out.until(lambda report: condition(report, "KernelModules").reason == "ProbeTimedOut")
        assert not report.ready
        # The worker itself does not hang, so it must not be replaced.
        soon(lambda: view.step() is None or None, "end of the pass", 60.0)
        del node.kernel.pipes[STUCK]
    assert out.until(lambda report: report.ready)


def test_a_disruptive_change_waits_until_its_announcement_is_published(
    node: Node, worker: Worker, awaited: Queue[tuple[str, Step | None]]
) -> None:
    node.kernel.files.write(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs", "2")
    out = worker(
        f'{{"node_name": "n1", "nics": [{{"name": "a", "select": {{"pci": "{PF0}"}}, "vfs": {{"count": 3}}}}]}}'
    )
    announced = out.until(lambda report: bool(report.announcement))
    assert not announced.ready
    # The supervisor must not take the wait, which may be longer than any read, for a read that hangs.
    assert awaited.get(timeout=120) == (announced.announcement, None)
    assert out.until(lambda report: report.ready).announcement == ""


def test_to_ask_when_the_kubelet_started_may_take_no_longer_than_a_read(
    node: Node, worker: Worker, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[Step | None]()

    def started(host: object) -> float:
        steps.append(view.step())
        return 0.0

    monkeypatch.setattr(type(node.kernel.host), "started", started)
    assert worker(one(9000)).until(lambda report: report.ready)
    assert {step and (step.kind, step.mode, step.device) for step in steps} == {("kubelet", "read", "")}


def test_a_netdev_that_a_pattern_matches_is_steered_when_it_is_announced(
    node: Node, announced: Announced, worker: Worker
) -> None:
    written = Queue[str]()

    def note(operation: str, where: str, value: str) -> None:
        if "cali1f" in where:
            written.put(value)

    node.kernel.fault = note
    worker('{"node_name": "n1", "rps": {"netdevs": [{"match": "cali*", "cpus": "1"}]}}').ready()
    node.kernel.add_virtual("cali1f")
    announced.announce(Event(ifindex=99, netdev="cali1f"))
    # If the event is lost, the agent reads everything again only after a minute.
    assert written.get(timeout=45) == "00000002"


def test_a_repair_is_drift_and_names_the_programs_that_ran_and_a_change_of_the_spec_is_neither(
    node: Node, announced: Announced, worker: Worker, tmp_path: Path
) -> None:
    node.kernel.host.processes |= {"NetworkManager", "sriov-network-c", "tuned"}
    worker(one(9000, vfs={"count": 3})).ready()
    counts = read_drift(tmp_path / drift.NAME)
    assert set(counts.repairs) == set(by_name())
    assert set(counts.repairs.values()) == {0}
    assert ("vfs", "NetworkManager") in counts.suspects
    node.kernel.files.write(f"/sys/bus/pci/devices/{PF0}/sriov_numvfs", "0")
    announced.announce(Event(function=PF0, is_pci=True))
    soon(lambda: read_drift(tmp_path / drift.NAME).repairs["vfs"] or None, "the repair", 120.0)
    suspects = ("sriov-network-config-daemon", "NetworkManager")
    counts = read_drift(tmp_path / drift.NAME)
    assert counts.repairs["vfs"] == 1
    assert {program: count for (kind, program), count in counts.suspects.items() if kind == "vfs"} == dict.fromkeys(
        suspects, 1
    )
    made, repaired = [entry for entry in read_history(tmp_path) if entry.outcome.change.kind == "vfs"]
    assert (made.suspects, repaired.suspects) == ((), suspects)
    # Another agent of the same boot continues the count.
    assert Drift.load(tmp_path, other_writers()).counts.repairs["vfs"] == 1


def test_each_pass_is_an_entry_of_the_journal(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(tmp_path / "journal") as journald:
        monkeypatch.setattr(pass_log, "SOCKET", tmp_path / "journal")
        out = worker(one(9000, vfs={"count": 3}))
        spec_hash = out.until(lambda report: report.ready).spec_hash
        entry = heard(journald)
    assert entry["TRACKBED_TRIGGER"] == ["spec"]
    assert entry["TRACKBED_SPEC_HASH"] == [spec_hash]
    assert f"applied: vfs {PF0} count: 0 -> 3" in entry["TRACKBED_CHANGE"]
    assert 0 < int(entry["TRACKBED_DURATION_USEC"][0]) < 60_000_000


@pytest.mark.parametrize("reason", ["DeviceLost", "PassCrashed"])
def test_after_a_pass_that_ended_early_any_event_leads_to_a_full_reading(
    node: Node, announced: Announced, worker: Worker, reason: str
) -> None:
    def crash(operation: str, where: str, value: str) -> None:
        raise KeyError(where)

    kernel = node.kernel
    out = worker(both(9000)).ready()
    for pf in (PF0, PF1):  # PF0's drift sends no event
        kernel.netlink.set_link(kernel.netdev(pf).ifindex, mtu=1500)
    if reason == "DeviceLost":
        kernel.unreadable.add("/sys/devices/system/cpu/online")
        announced.announce(Event(every_device=True))
    else:
        kernel.fault = crash
        announced.announce(Event(ifindex=kernel.netdev(PF1).ifindex))
    out.until(lambda report: condition(report, "Converged").reason == reason)
    kernel.unreadable.clear()
    kernel.fault = no_fault
    announced.announce(Event(ifindex=kernel.netdev(PF1).ifindex))
    assert out.until(lambda report: report.ready)
    assert [kernel.netdev(pf).mtu for pf in (PF0, PF1)] == [9000, 9000]


def test_the_worker_first_says_that_it_serves(worker: Worker) -> None:
    out = worker('{"node_name": "n1"}').ready()
    assert out.said[0] == {"serving": True}
    assert [line for line in out.said if "serving" in line] == out.said[:1]


def test_the_supervisor_is_told_at_once_of_an_event_about_a_required_device(
    node: Node, announced: Announced, worker: Worker, view: View
) -> None:
    out = worker(one(9000)).ready()
    assert {"checking": True} not in out.said
    lower_mtu(node, announced)
    soon(lambda: {"checking": True} in out.said or None, "checking", 60.0)
    soon(lambda: (node.kernel.netdev(PF0).mtu == 9000 and not view.waits()) or None, "a repair", 60.0)


def test_what_was_read_to_check_a_new_spec_is_not_read_again_by_its_first_pass(
    node: Node, worker: Worker, reload: Reload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the pass itself has changed is read again."""
    reads: Counter[str] = Counter()
    read = node.kernel.files.read
    monkeypatch.setattr(SimFiles, "read", lambda files, path: (reads.update([path]), read(path))[1])
    out = worker(both(9000))
    before = out.until(lambda report: report.ready)
    reads.clear()
    reload(both(4000))
    after = out.until(lambda report: report.ready and report.spec_hash != before.spec_hash)
    assert (node.kernel.netdev(PF0).mtu, after.up_to_date) == (4000, True)
    unchanged, changed = (f"/sys/class/net/{node.kernel.netdev(pf).name}/queues/rx-0/rps_cpus" for pf in (PF1, PF0))
    assert (reads[f"/sys/bus/pci/devices/{PF1}/numa_node"], reads[unchanged]) == (1, 1)
    assert reads[changed] > 1


def test_a_change_by_others_after_a_new_spec_was_checked_is_repaired(
    node: Node, announced: Announced, worker: Worker, reload: Reload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check has read the MTU of a NIC, and another program sets it before the first pass begins."""
    out = worker(both(9000))
    before = out.until(lambda report: report.ready)
    link, read = node.kernel.netdev(PF1), node.kernel.files.read
    late = f"/sys/class/net/{link.name}/queues/rx-0/rps_cpus"

    def disturbing(files: SimFiles, path: str) -> str:
        if path == late:
            monkeypatch.setattr(SimFiles, "read", lambda files, path: read(path))
            node.kernel.netlink.set_link(link.ifindex, mtu=1500)
            announced.announce(Event(ifindex=link.ifindex))
        return read(path)

    monkeypatch.setattr(SimFiles, "read", disturbing)
    reload(both(4000))
    out.until(lambda report: report.ready and report.spec_hash != before.spec_hash)
    assert (node.kernel.netdev(PF0).mtu, node.kernel.netdev(PF1).mtu) == (4000, 9000)


def test_a_file_that_was_refused_is_read_again_without_being_asked(
    worker: Worker, reload: Reload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "RESYNC", 0.2)
    out = worker(one(9000))
    before = out.until(lambda report: report.ready)
    reload("nonsense")
    out.until(lambda report: not report.up_to_date)
    (tmp_path / "node.json").write_text(one(4000))
    assert out.until(lambda report: report.up_to_date and report.ready).spec_hash != before.spec_hash


def test_a_file_in_force_is_not_read_again_without_being_asked(
    node: Node, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "RESYNC", 0.2)
    worker(one(9000)).ready()
    (tmp_path / "node.json").write_text(one(4000))

    soon(lambda: triggers(tmp_path) or None, "record of the first pass", 60.0)
    for _ in range(2):
        before = len(triggers(tmp_path))
        node.kernel.netlink.set_link(node.kernel.netdev(PF0).ifindex, mtu=1500)
        # Once it is recorded, the value was read back: drift before that would be a write that failed.
        soon(lambda before=before: len(triggers(tmp_path)) > before or None, "a full pass", 60.0)  # type: ignore[misc]
    assert node.kernel.netdev(PF0).mtu == 9000
    assert set(triggers(tmp_path)) == {"spec", "resync"}


def test_a_disk_that_hangs_delays_no_report_and_is_not_taken_for_the_device_read_last(
    node: Node, worker: Worker, view: View, tmp_path: Path
) -> None:
    history = tmp_path / "history.jsonl"
    os.mkfifo(history)
    pipe = os.open(history, os.O_RDWR | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(1 << 16))
    worker(one(4000)).ready()
    call = "write the history and the drift"
    step = soon(lambda: step if (step := view.step()) and step.call == call else None, "record of the write", 60.0)
    assert (step.kind, step.mode, step.device) == ("records", "write", "")
    os.read(pipe, 1 << 16)
    soon(lambda: view.step() is None or None, "a wait for events", 60.0)
    os.close(pipe)
