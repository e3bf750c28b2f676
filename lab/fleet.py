"""All nodes of a lab together: boot them, stop them, and look them up."""

from attrs import evolve

from lab import host, image, instance
from lab.errors import BadInput, LabError
from lab.hardware import ALL_MACHINES, MACHINES, Machine
from lab.instance import Instance, Plan
from lab.node import Node
from lab.progress import say, step
from lab.qemu import accelerator


def nodes(name: str | None = None) -> tuple[Node, ...]:
    """The nodes of a lab that is up; by default TRACKBED_LAB names the lab."""
    lab = instance.named(name)
    plan = lab.plan()
    if plan is None:
        raise LabError(f"lab {lab.name} is down", "`python -m lab up` starts it.")
    return _nodes(lab, plan)


def up(name: str | None = None, count: int | None = None) -> bool:
    """Build the image if it is missing, and boot the nodes that are off. Returns whether anything had to be done.

    :param count: the number of nodes; by default that of the lab, or two.
    """
    lab = instance.named(name)
    with lab.lock():
        plan = lab.plan()
        if plan is not None and count not in (None, len(plan.machines)):
            # A running node's NICs are connected to the nodes that were there when it was started.
            raise BadInput(f"lab {lab.name} has {len(plan.machines)} nodes", "Run `python -m lab down`, then `up`.")
        there = _nodes(lab, plan) if plan is not None else ()
        if there and all(node.pid() is not None and node.answers(10.0) for node in there):
            for node in there:
                # A Ctrl-C may have left out what runs beside its QEMU.
                node.power_on()
            return False
        host.ensure_packages()
        if plan is None:
            disk = image.ensure()
            plan = Plan(disk, accelerator.choose(disk.kernel), {})
        machines = plan.machines or (ALL_MACHINES[:count] if count else MACHINES)
        lab.make_keys(machines)
        plan = _with_ports(lab, plan, machines)
        lab.record(plan)
        fleet = _nodes(lab, plan)
        with step(f"booting {', '.join(node.name for node in fleet)}", usual_s=plan.accelerator.usual(45)):
            for node in fleet:
                node.power_on()
            # One after the other: threads would outlive a Ctrl-C.
            for node in fleet:
                node.boot()
                say(f"    {node.name}: ssh answers on 127.0.0.1 port {node.ssh_port}")
        return True


def down() -> bool:
    """Stop the nodes and delete their disks. Returns whether there was anything to delete."""
    lab = instance.named()
    with lab.lock():
        # This must work with a damaged or missing plan, too: it is the remedy for both.
        ports = {machine.name: 0 for machine in ALL_MACHINES}
        leftovers = _nodes(lab, Plan(image.Image(lab.folder), accelerator.TCG, ports))
        existed = any(node.pid() is not None or node.overlay.exists() for node in leftovers)
        for node in leftovers:
            node.discard()
        lab.forget()
        return existed


def _nodes(lab: Instance, plan: Plan) -> tuple[Node, ...]:
    return tuple(_node(lab, plan, machine, plan.machines, plan.ports[machine.name]) for machine in plan.machines)


def _node(lab: Instance, plan: Plan, machine: Machine, machines: tuple[Machine, ...], port: int) -> Node:
    peers = tuple(other for other in machines if other is not machine)
    return Node(machine, lab, plan.image, plan.accelerator, port, peers)


def _with_ports(lab: Instance, plan: Plan, machines: tuple[Machine, ...]) -> Plan:
    """Keep the ports of running nodes, and those of other nodes if they are still free."""
    ports: dict[str, int] = {}
    for machine in machines:
        port = plan.ports.get(machine.name, 0)
        running = port and _node(lab, plan, machine, machines, port).pid() is not None
        ports[machine.name] = port if running or (port and instance.is_free(port)) else instance.free_port()
    return evolve(plan, ports=ports)
