"""Interrupts that follow the CPUs of pods, by the worker's loop on the simulated kernel."""

import json
from pathlib import Path

from agent.hardware.functions import pci_of
from agent.machine import Event
from agent.report import drift
from agent.report.drift import read_drift
from agent.report.history import read as read_history
from agent.report.names import KUBELET_CPUS
from tests.contract.asking import soon
from tests.sim.readiness import Node
from tests.sim.service.running import Announced, Worker, lower_mtu, one
from tests.sim.two_nics import PF0


def test_interrupts_that_leave_the_cpus_of_a_new_pod_and_come_back_are_no_drift(
    node: Node, announced: Announced, worker: Worker, tmp_path: Path
) -> None:
    kernel = node.kernel
    kernel.host.processes.add("crio")
    worker(one(9000)).ready()

    def moved(said: str, since: int) -> bool | None:
        changes = [entry.outcome.change for entry in read_history(tmp_path)][since:]
        return any(change.kind == "irqs" and str(change).endswith(said) for change in changes) or None

    for entries, said in (({"pod": {"app": "1"}}, "(CPU 1 belongs to pod pod)"), ({}, " -> 1")):
        before = len(list(read_history(tmp_path)))
        kernel.tree.put(KUBELET_CPUS[0], json.dumps({"entries": entries}))
        announced.announce(Event(every_device=True))
        # If the event is lost, the agent reads everything again only after a minute.
        soon(lambda said=said, before=before: moved(said, before), said, 45.0)  # type: ignore[misc]
    lower_mtu(node, announced)
    soon(lambda: read_drift(tmp_path / drift.NAME).repairs["links"] or None, "the repair", 45.0)
    assert read_drift(tmp_path / drift.NAME).repairs.total() == 1
    assert not any(entry.suspects for entry in read_history(tmp_path) if entry.outcome.change.kind == "irqs")


def test_the_event_of_a_vf_that_goes_to_a_pod_brings_its_interrupts_there_and_that_is_no_drift(
    node: Node, announced: Announced, worker: Worker, tmp_path: Path
) -> None:
    kernel = node.kernel
    kernel.host.processes.add("crio")
    kernel.tree.put(KUBELET_CPUS[0], json.dumps({"entries": {"pod": {"app": "1"}}}))
    worker(one(9000, altnames=["fabric"], vfs={"count": 1, "defaults": {"irqs_on_pod_cpus": True}})).ready()
    vf = pci_of(kernel.files, f"{PF0}#0")
    number = kernel.files.names(f"/sys/bus/pci/devices/{vf}/msi_irqs")[-1]
    affinity = f"/proc/irq/{number}/smp_affinity_list"
    home, index = kernel.files.read(affinity), kernel.netdev(vf).ifindex
    assert home != "1"
    kernel.host.allocated[vf], kernel.host.exclusive[vf] = ("team/trader",), frozenset({1})
    kernel.move_away(vf)
    announced.announce(Event(ifindex=index))
    # If the event is lost, the agent reads everything again only after a minute.
    soon(lambda: kernel.files.read(affinity) == "1" or None, "the interrupts are on the CPU of the pod", 45.0)
    kernel.netlink.remove_altname(kernel.netdev(PF0).ifindex, "fabric")
    announced.announce(Event(ifindex=kernel.netdev(PF0).ifindex))
    soon(lambda: read_drift(tmp_path / drift.NAME).repairs["links"] or None, "the repair", 45.0)
    assert read_drift(tmp_path / drift.NAME).repairs.total() == 1
    assert not any(entry.suspects for entry in read_history(tmp_path) if entry.outcome.change.kind == "irqs")
