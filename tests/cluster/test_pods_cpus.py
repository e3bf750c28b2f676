"""A pod with CPUs of its own, which a kubelet with the static policy gives it: while it runs, no NIC interrupts them, or only
the pod's own VF does, if the spec says so (`irqs_on_pod_cpus`).
"""

import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agent.report.names import KUBELET_CPUS
from agent.spec.ranges import parse_ranges
from bench import exchange
from lab import Node
from lab.cluster import dra_driver, join, manifests
from lab.cluster.control_plane import ControlPlane
from tasks.kubernetes.manifests.device_plugins import SRIOV_DRIVER
from tests.cluster.conftest import LONG, Member, Say
from tests.cluster.objects import claim_template, device_class
from tests.cluster.test_gate import phase
from tests.lab.conftest import eventually, give, ready, settled, spec

CONFIG = "/var/lib/kubelet/config.yaml"
STATE = KUBELET_CPUS[0]
STATIC = 'cpuManagerPolicy: static\nreservedSystemCPUs: "0"\n'
POD = "with-cpus-of-its-own"
VF = "vf-of-any-nic"
"""The names of the class of the devices that a pod claims, and of the template of its claim."""
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


@pytest.fixture
def claimable(static: Member) -> Iterator[Member]:
    """That member, whose VFs can be claimed and have `irqs_on_pod_cpus`. No RDMA device goes to a pod."""
    plane, node, _ = static
    before, wanted = spec(node), spec(node)
    for nic in wanted["nics"]:
        nic["rdma"] = None
        nic["vfs"]["defaults"]["irqs_on_pod_cpus"] = True
    give(node, wanted)
    settled(node)
    plane.apply(device_class(VF, f"device.driver == '{SRIOV_DRIVER}'"), claim_template(VF, deviceClassName=VF))
    dra_driver.start(node)
    yield static
    objects = (f"pod/{POD}", f"deviceclass/{VF}", f"resourceclaimtemplate/{VF}")
    plane.kubectl("delete", *objects, "--ignore-not-found", timeout=LONG)
    node.sh(f"systemctl stop {dra_driver.UNIT}")
    give(node, before)
    settled(node)


def pod(name: str, command: list[str]) -> dict[str, Any]:
    """A pod for the Node of this name, which gets a CPU of its own."""
    made = manifests.pod(POD, command, selector={"kubernetes.io/hostname": name})
    made["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "1", "memory": "128Mi"}}
    return made


def claimed_vf(plane: ControlPlane) -> str:
    """The address of the VF that the pod has."""
    (status,) = plane.get("pod", POD)["status"]["resourceClaimStatuses"]
    (device,) = plane.get("resourceclaim", status["resourceClaimName"])["status"]["allocation"]["devices"]["results"]
    domain, bus, slot, function = device["device"].split("-")
    return f"{domain}:{bus}:{slot}.{function}"


def state(node: Node) -> Mapping[str, object]:
    """The file in which the kubelet keeps the CPUs that it has given to pods."""
    found: dict[str, object] = json.loads(node.run(["cat", STATE]).stdout or "{}")
    return found


def cpus_of_pods(node: Node) -> frozenset[int]:
    entries = state(node).get("entries", {})
    assert isinstance(entries, dict)
    return frozenset(cpu for pod in entries.values() for text in pod.values() for cpu in parse_ranges(text))


def numbers(node: Node, *functions: str) -> frozenset[str]:
    """The interrupts of these functions; without any, those of the NICs and of their VFs."""
    every = functions or [f"{nic.pci}{own}" for nic in node.machine.nics for own in ("", "/virtfn*")]
    folders = " ".join(f"/sys/bus/pci/devices/{function}/msi_irqs" for function in every)
    return frozenset(word for word in node.sh(f"ls {folders} 2>/dev/null || true").split() if word.isdigit())


def affinities(node: Node) -> dict[str, str]:
    """The CPUs of each of them."""
    ours = sorted(numbers(node))
    paths = " ".join(f"/proc/irq/{number}/smp_affinity_list" for number in ours)
    return dict(zip(ours, node.sh(f"cat {paths}").splitlines(), strict=True))


def are_on(node: Node, cpus: frozenset[int], only: Collection[str] = ()) -> bool:
    """Whether these interrupts are on these CPUs, and no others of the NICs are."""
    now = {number: frozenset(parse_ranges(text)) for number, text in affinities(node).items()}
    return all(of <= cpus if number in only else of.isdisjoint(cpus) for number, of in now.items())


def arrived(node: Node, seconds: int = WINDOW) -> dict[int, int]:
    """How many interrupts of the NICs arrive at each CPU in this time."""
    every, _ = counted(node, seconds, ())
    return every


def counted(node: Node, seconds: int, some: Collection[str]) -> tuple[dict[int, int], dict[int, int]]:
    """How many interrupts of the NICs arrive at each CPU in this time: those other than these, and these."""
    table, every = "cat /proc/interrupts", numbers(node)
    before, after = node.sh(f"{table}; sleep {seconds}; echo; {table}", timeout=LONG + seconds).split("\n\n")
    cpus = [int(name.removeprefix("CPU")) for name in after.splitlines()[0].split()]

    def total(text: str, ours: Collection[str]) -> list[int]:
        rows = [words[1:] for line in text.splitlines() if (words := line.split())[0].rstrip(":") in ours]
        return [sum(int(row[at]) for row in rows) for at in range(len(cpus))]

    def counts(ours: Collection[str]) -> dict[int, int]:
        return {cpu: now - then for cpu, then, now in zip(cpus, total(before, ours), total(after, ours), strict=True)}

    return counts(every.difference(some)), counts(some)


def beside_the_loop(plane: ControlPlane, node: Node, seconds: int) -> tuple[dict[int, int], str]:
    """How many interrupts of the NICs arrive at each CPU while the pod spins for this time, and for how long it did not run."""
    words = ("python3", "-c", inspect.getsource(exchange), "spin", str(seconds))
    with ThreadPoolExecutor() as pool:
        spinning = pool.submit(plane.kubectl, "exec", POD, "--", *words, timeout=LONG + seconds)
        during = arrived(node, seconds)
        stops = json.loads(spinning.result())
    return (
        during,
        f"stops of its loop: p99 of the longest in each ms {stops['gap']:.0f} µs, of all {stops['longest']:.0f} µs",
    )


def test_no_nic_interrupts_the_cpus_of_a_pod_while_it_runs(static: Member, say: Say) -> None:
    plane, node, name = static
    places, before = affinities(node), arrived(node)
    plane.apply(pod(name, ["sleep", "3600"]))
    eventually("the kubelet has given it a CPU", lambda: bool(cpus_of_pods(node)), LONG)
    cpus = cpus_of_pods(node)
    # If the event is lost, the agent reads everything again only after a minute.
    eventually("the interrupts go elsewhere", lambda: are_on(node, cpus), within=45)
    eventually("it runs", lambda: phase(plane, POD) == "Running", LONG)
    assert ready(node)
    # On x86 an interrupt moves when the next one arrives (agent/kinds/irqs.py), so each may arrive once more.
    eventually("none arrives any more", lambda: not any(arrived(node)[cpu] for cpu in cpus), LONG)
    during, stops = beside_the_loop(plane, node, QUIET)
    # For comparison: the same loop, and the interrupts where they were before the pod.
    node.sh("systemctl stop trackbed", timeout=LONG)
    try:
        node.sh("; ".join(f"echo {text} > /proc/irq/{number}/smp_affinity_list" for number, text in places.items()))
        left, stops_left = beside_the_loop(plane, node, WINDOW)
    finally:
        node.sh("systemctl start trackbed", timeout=LONG)
    eventually("the agent has them go elsewhere again", lambda: are_on(node, cpus), LONG)
    plane.kubectl("delete", "pod", POD, timeout=LONG)
    eventually("the kubelet has the CPU back", lambda: not cpus_of_pods(node), LONG)
    eventually("the interrupts are back", lambda: affinities(node) == places, within=45)
    after = arrived(node)
    say(
        f"interrupts of NICs by CPU: {before} in {WINDOW} s before, "
        f"{during} in {QUIET} s while a pod has {set(cpus)} ({stops}), "
        f"{left} in {WINDOW} s while the pod has it and no agent runs ({stops_left}), {after} in {WINDOW} s after"
    )
    assert all(before[cpu] > 0 and left[cpu] > 0 and after[cpu] > 0 for cpu in cpus)
    assert [during[cpu] for cpu in cpus] == [0] * len(cpus)
    assert sum(during.values()) > 0
    entries = (json.loads(line)["outcome"]["change"] for line in node.sh("trackbed history --json").splitlines())
    assert any(
        str(entry.get("note", "")).startswith("CPU ") and "belongs to pod " in entry["note"] for entry in entries
    )


def test_the_interrupts_of_a_pods_vf_are_on_its_cpus_and_no_other_nics_are(claimable: Member, say: Say) -> None:
    plane, node, name = claimable
    places = affinities(node)
    ping = "until ping -6 -q -i 0.01 ff02::1%$(cd /sys/class/net && echo ens*); do sleep 1; done"
    made = pod(name, ["sh", "-c", ping])
    made["spec"]["resourceClaims"] = [{"name": "devices", "resourceClaimTemplateName": VF}]
    made["spec"]["containers"][0]["resources"]["claims"] = [{"name": "devices"}]
    plane.apply(made)
    eventually("it runs", lambda: phase(plane, POD) == "Running", LONG)
    cpus, vf = cpus_of_pods(node), claimed_vf(plane)
    own = numbers(node, vf)
    eventually("the VF's interrupts are there, others are not", lambda: are_on(node, cpus, own), within=45)
    assert ready(node)

    def astray(others: Mapping[int, int], of_vf: Mapping[int, int]) -> int:
        return sum(of_vf[cpu] if cpu not in cpus else count for cpu, count in others.items())

    # Each may arrive once more where it was, as in the test before.
    eventually("each arrives where it is", lambda: not astray(*counted(node, WINDOW, own)), LONG)
    others, of_vf = counted(node, WINDOW, own)
    plane.kubectl("delete", "pod", POD, timeout=LONG)
    eventually("the kubelet has the CPU back", lambda: not cpus_of_pods(node), LONG)
    eventually("the interrupts are back", lambda: affinities(node) == places, LONG)
    say(
        f"interrupts by CPU in {WINDOW} s while a pod has {set(cpus)}: {of_vf} of its VF {vf}, {others} of other functions"
    )
    assert astray(others, of_vf) == 0
    assert all(of_vf[cpu] > 0 for cpu in cpus)
    assert sum(others.values()) > 0
