"""`python -m lab cluster`: a Kubernetes cluster of the lab's nodes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from lab import fleet, instance
from lab.cluster import bundle, join, manifests, network_plugins, programs
from lab.cluster.control_plane import ControlPlane, Ports, create
from lab.errors import LabError
from lab.instance import Instance
from lab.progress import say, step

OURS = Path(__file__).parent.parent.parent / "fleet" / "cluster"
"""The cluster's objects for Trackbed: namespace, roles, admission policies."""


def plane_of(lab: Instance) -> ControlPlane:
    """The control plane of a lab."""
    return create(_folder(lab), lab.name)


def rendered(lab: Instance) -> Path:
    """The folder in which the deploy writes a lab's manifests."""
    return lab.folder / "manifests"


def discard(lab: Instance) -> None:
    """Stop a lab's control plane and delete its data, if there is one."""
    if _folder(lab).exists():
        # This must work with damaged or missing ports, too: it is the remedy for both.
        ControlPlane(_folder(lab), Ports(0, 0, 0), lab.name).discard()


def _folder(lab: Instance) -> Path:
    return lab.folder / "cluster"


@click.group()
def cluster() -> None:
    """A real Kubernetes cluster: its control plane on this host, kubelet and containerd on the nodes."""


def bring_up(lab: Instance) -> ControlPlane:
    """Start a lab's control plane, create what Trackbed needs, and install the programs on the nodes."""
    nodes = fleet.nodes(lab.name)
    plane = plane_of(lab)
    # The programs come first, as building them may take minutes.
    network_plugins.build()
    bundle.ensure()
    programs.etcd()
    if not plane.running():
        with step("starting the control plane", usual_s=15):
            plane.start()
    with ThreadPoolExecutor() as pool:
        list(pool.map(join.install, nodes))
    plane.kubectl("apply", "--kustomize", str(OURS))
    return plane


@cluster.command()
def up() -> None:
    """Start the control plane, and install kubelet and containerd on the nodes; the programs are built once (6 minutes)."""
    plane = bring_up(instance.named())
    say(f"the control plane runs: {plane.url}; `python -m lab cluster join` lets the nodes join")


def nodes_line(names: dict[str, str]) -> str:
    """The Nodes' names; a Node whose machine has another name in the lab is shown with that name, too.

    :param names: the machines' names in the lab, by the Nodes' names.
    """
    return "Nodes " + ", ".join(join.called(name, machine) for name, machine in names.items())


@cluster.command("join")
def join_command() -> None:
    """Apply the manifests that the deploy has rendered, let the nodes join, and wait until their kubelets are ready."""
    lab = instance.named()
    nodes = fleet.nodes()
    if not _folder(lab).exists() or not (plane := plane_of(lab)).running():
        raise LabError(f"the control plane of lab {lab.name} does not run", "`python -m lab cluster up` starts it.")
    if not rendered(lab).exists():
        deploy = "`.venv/bin/pyinfra -y inventories/lab_cluster.py deploy.py` renders them."
        raise LabError(f"no deploy has rendered manifests for lab {lab.name}", deploy)
    manifests.apply(plane, rendered(lab))
    names: dict[str, str] = {}
    with step("joining the nodes", usual_s=nodes[0].accelerator.usual(40)):
        for node in nodes:
            name = join.node_name(node)
            if not join.ready(plane, name):
                join.join(plane, node)
            names[name] = node.name
        for node in nodes:
            join.wait_ready(plane, node)
    kubectl = programs.kubernetes("kubectl")
    for line in (
        f"the cluster is up: {nodes_line(names)}. What to try:",
        "    .venv/bin/pyinfra -y inventories/lab_cluster.py deploys/token.py  # first: the reporters' tokens",
        f"    export KUBECONFIG={plane.admin}",
        f"    export PATH={kubectl.parent}:$PATH",
        "    kubectl get nodes -o custom-columns=NAME:.metadata.name,TAINTS:.spec.taints[*].key",
        f"    kubectl -n {manifests.NAMESPACE} get pods -o wide",
        f"    kubectl describe node {next(iter(names))}",
        "    make lab-down",
    ):
        say(line)


@cluster.command()
def down() -> None:
    """Stop the control plane and delete its data; nothing is removed from the nodes."""
    discard(instance.named())
    say("the control plane is deleted; `python -m lab cluster up` makes a new one")
