"""A pod with CPUs of its own, which a kubelet with the static policy gives it: no NIC interrupts them while it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest

from agent.report.names import KUBELET_CPUS
from agent.spec.ranges import parse_ranges
from lab import Node
from lab.cluster import join, manifests
from tests.cluster.conftest import LONG, Member, Say
from tests.cluster.test_gate import phase
from tests.lab.conftest import eventually, ready, settled

CONFIG = "/var/lib/kubelet/config.yaml"
STATE = KUBELET_CPUS[0]
STATIC = 'cpuManagerPolicy: static\nreservedSystemCPUs: "0"\n'
POD = "with-cpus-of-its-own"
PINGS = "pings-of-a-test"
WINDOW = 60
"""Seconds for which interrupts are counted. Also without traffic, igb has each queue's interrupt arrive every two seconds."""
QUIET = 600
"""Seconds for which none may arrive on the CPUs of the pod."""

pytestmark = pytest.mark.campaign


@pytest.fixture
def static(member: Member) -> Iterator[Member]:
    """The member, while its kubelet has the static policy, and its NICs have traffic."""
    plane, node, _ = member
    # A kubelet refuses the state of another policy.
    restart = f"rm -f {STATE}; systemctl restart kubelet"
    node.sh(f"cp {CONFIG} /run/kubelet-config; printf %s '{STATIC}' >> {CONFIG}; {restart}", timeout=LONG)
    join.wait_ready(plane, node)
    eventually("the kubelet has the policy", lambda: state(node).get("policyName") == "static", LONG)
    pings = " & ".join(f"ping -6 -q -i 0.01 ff02::1%{nic.netdev}" for nic in node.machine.nics)
    node.sh(f"systemd-run --unit={PINGS} sh -c '{pings} & wait'")
    settled(node)
    yield member
    plane.kubectl("delete", "pod", POD, "--ignore-not-found", timeout=LONG)
    node.sh(f"systemctl stop {PINGS}; cp /run/kubelet-config {CONFIG}; {restart}", timeout=LONG)
    join.wait_ready(plane, node)


def state(node: Node) -> Mapping[str, object]:
    """The file in which the kubelet keeps the CPUs that it has given to pods."""
    found: dict[str, object] = json.loads(node.run(["cat", STATE]).stdout or "{}")
    return found


def cpus_of_pods(node: Node) -> frozenset[int]:
    entries = state(node).get("entries", {})
    assert isinstance(entries, dict)
    return frozenset(cpu for pod in entries.values() for text in pod.values() for cpu in parse_ranges(text))


def numbers(node: Node) -> frozenset[str]:
    """The interrupts of the NICs and of their VFs."""
    folders = " ".join(
        f"/sys/bus/pci/devices/{nic.pci}/{own}msi_irqs" for nic in node.machine.nics for own in ("", "virtfn*/")
    )
    return frozenset(word for word in node.sh(f"ls {folders} 2>/dev/null || true").split() if word.isdigit())


def affinities(node: Node) -> dict[str, str]:
    """The CPUs of each of them."""
    paths = " ".join(f"/proc/irq/{number}/smp_affinity_list" for number in sorted(numbers(node)))
    return dict(line.split(":") for line in node.sh(f"grep -H . {paths}").splitlines())


def avoids(node: Node, cpus: frozenset[int]) -> bool:
    return all(cpus.isdisjoint(parse_ranges(text)) for text in affinities(node).values())


def arrived(node: Node, seconds: int = WINDOW) -> dict[int, int]:
    """How many interrupts of the NICs arrive at each CPU in this time."""
    table, ours = "cat /proc/interrupts", numbers(node)
    before, after = node.sh(f"{table}; sleep {seconds}; echo; {table}", timeout=LONG + seconds).split("\n\n")
    counts = [
        [words[1:] for line in text.splitlines() if (words := line.split())[0].rstrip(":") in ours]
        for text in (before, after)
    ]
    cpus = [int(name.removeprefix("CPU")) for name in after.splitlines()[0].split()]
    return {
        cpu: sum(int(line[at]) for line in counts[1]) - sum(int(line[at]) for line in counts[0])
        for at, cpu in enumerate(cpus)
    }


def test_no_nic_interrupts_the_cpus_of_a_pod_while_it_runs(static: Member, say: Say) -> None:
    plane, node, name = static
    places, before = affinities(node), arrived(node)
    pod = manifests.pod(POD, ["sleep", "3600"], selector={"kubernetes.io/hostname": name})
    pod["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "1", "memory": "32Mi"}}
    plane.apply(pod)
    eventually("the kubelet has given it a CPU", lambda: bool(cpus_of_pods(node)), LONG)
    cpus = cpus_of_pods(node)
    # If the event is lost, the agent reads everything again only after a minute.
    eventually("the interrupts go elsewhere", lambda: avoids(node, cpus), within=45)
    eventually("it runs", lambda: phase(plane, POD) == "Running", LONG)
    assert ready(node)
    # On x86 an interrupt moves when the next one arrives (agent/kinds/irqs.py), so each may arrive once more.
    eventually("none arrives any more", lambda: not any(arrived(node)[cpu] for cpu in cpus), LONG)
    during = arrived(node, QUIET)
    plane.kubectl("delete", "pod", POD, timeout=LONG)
    eventually("the kubelet has the CPU back", lambda: not cpus_of_pods(node), LONG)
    eventually("the interrupts are back", lambda: affinities(node) == places, within=45)
    after = arrived(node)
    say(
        f"interrupts of NICs by CPU: {before} in {WINDOW} s before, {during} in {QUIET} s while a pod has {set(cpus)}, "
        f"{after} in {WINDOW} s after"
    )
    assert all(before[cpu] > 0 and after[cpu] > 0 for cpu in cpus)
    assert [during[cpu] for cpu in cpus] == [0] * len(cpus)
    assert sum(during.values()) > 0
    entries = (json.loads(line)["outcome"]["change"] for line in node.sh("trackbed history --json").splitlines())
    assert any(
        str(entry.get("note", "")).startswith("CPU ") and "belongs to pod " in entry["note"] for entry in entries
    )
