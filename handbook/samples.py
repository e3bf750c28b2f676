"""Made-up data of the pictures in the site: a fabric, a fleet, a server. Nothing was measured."""

from __future__ import annotations

from cli.topology import Cache, Core, Device, NumaNode, Served
from fleet.fabric.ends import Ends
from fleet.fabric.tests import FabricSettings
from fleet.fabric.verdict import Verdict, verdict
from fleet.last_deploy import LastDeploy, Operation
from fleet.report.history import History, NodeCourse
from tests.sim.fabric import Fabric, Kind, ends

BAD: dict[str, Kind] = {
    "node00003/rail1": "blocked",
    "node00006/rail6": "slow",
    "node00010/rail2": "receives slowly",
    "node00012/rail5": "bad switch port",
}

STEP, STEPS, MIDNIGHT = 900, 96, 1767312000
"""A day in steps of a quarter of an hour, in seconds; and when it ends."""

NODES, BROKEN, SILENT, FLAPPING = 10, 3, 5, 7
"""How many nodes there are; and the numbers of those that are not ready since noon, do not answer since the morning, and are
not ready at times."""


def fabric() -> tuple[Ends, Verdict]:
    """A test of 16 nodes with 8 rails, in which four NICs are bad."""
    simulated = Fabric(ends(16, 8), BAD)
    _, results = simulated.run(FabricSettings(across_rails=False))
    return simulated.ends, verdict(simulated.ends, results, True)


def fleet() -> History:
    """A day of ten nodes, three of which were not always ready. What is in no picture is left empty."""
    courses = tuple(_course(number) for number in range(NODES))
    links = [1.0 + step % 3 if step % 8 == 5 else 0.0 for step in range(STEPS)]
    vfs = [1.0 if step % 32 == 20 else 0.0 for step in range(STEPS)]
    return History(
        times=[MIDNIGHT - STEP * left for left in reversed(range(STEPS))],
        ready=[sum(course.ready[step] or 0.0 for course in courses) for step in range(STEPS)],
        silent=[sum(course.silent[step] or 0.0 for course in courses) for step in range(STEPS)],
        nodes=[float(NODES)] * STEPS,
        courses=courses,
        repairs={"links": links, "vfs": vfs},
        repaired={"links": (int(sum(links)), 2), "vfs": (int(sum(vfs)), 1)},
        is_ready={}, shares={}, faulty=(), suspects={}, most_repaired=(), contended=(), versions={}, specs={},
    )  # fmt: skip


def _course(number: int) -> NodeCourse:
    silent = [float(number == SILENT and step > STEPS // 3) for step in range(STEPS)]
    ready = [_ready(number, step) * (1 - silent[step]) for step in range(STEPS)]
    return NodeCourse(f"gpu-{number + 1:02}.example.net:9809", ready, silent)


def _ready(number: int, step: int) -> float:
    if number == BROKEN and step >= STEPS // 2:
        return 0.0
    return 0.6 if number == FLAPPING and step % 12 == 4 else 1.0


def deploy() -> LastDeploy:
    """A deploy whose longest step is to build drivers."""
    operations = (
        Operation("OFED | Modules for the running kernel", 10, 412.0, 301.0, "gpu-04.example.net"),
        Operation("Ready", 10, 96.0, 62.0, "gpu-06.example.net"),
        Operation("Base packages", 10, 71.0, 40.0, "gpu-02.example.net"),
        Operation("Agent | Stage", 10, 9.0, 6.0, "gpu-04.example.net"),
    )
    return LastDeploy(("inventories/prod.py", "deploy.py"), MIDNIGHT - 3600, MIDNIGHT - 2900, operations, {})


def topology() -> tuple[NumaNode, ...]:
    """A server of two sockets: one NIC's queues are spread over the cores, the other's are partly on the wrong socket."""
    nics = (("0000:18:00.0", "ens1f0np0", "mlx5_0", "rail0"), ("0000:9a:00.0", "ens5f0np0", "mlx5_1", "rail1"))
    queues = {cpu: [_queue("ens1f0np0", cpu, cpu)] for cpu in range(4)}
    queues |= {4: [_queue("ens5f0np0", queue, 4) for queue in range(3)], 5: [_queue("ens5f0np0", 3, 5)]}
    queues[3] = [*queues[3], _queue("ens5f0np0", 4, 3, misplaced=True)]
    sockets = []
    for number, (address, netdev, rdma, nic) in enumerate(nics):
        cores = tuple(Core((cpu,), tuple(queues.get(cpu, ()))) for cpu in range(4 * number, 4 * number + 4))
        card = Device(address, (netdev,), (rdma,), "mlx5_core", nic, "0-7")
        gpu = Device(f"0000:{'1b' if number == 0 else '9d'}:00.0", kind="GPU", driver="nvidia")
        sockets.append(NumaNode(number, number, (Cache(cores),), (card, gpu)))
    return tuple(sockets)


def _queue(netdev: str, number: int, cpu: int, misplaced: bool = False) -> Served:
    return Served(netdev, f"comp-{number}", misplaced, cpu)
