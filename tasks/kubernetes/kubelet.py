"""Gates the kubelet at boot: on a node that has joined a cluster, the kubelet starts only when the agent has verified the node.

The gate is a drop-in for the kubelet's unit. It depends on the agent's unit only by Wants= and After=, so a restart or
upgrade of the agent does not affect the kubelet. A running kubelet is never restarted for it.

The units and kubeconfig files of k3s and RKE2 are from vendor documents (docs.k3s.io, docs.rke2.io); not run.
"""

from __future__ import annotations

import re
from typing import Literal

from attrs import frozen
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common import archive, systemd_reload, units
from tasks.common.commands import Commands
from tasks.common.data import Key, record
from tasks.common.status import COMMAND
from tasks.common.texts import replace
from tasks.kubernetes import KUBERNETES

Policy = Literal["hold", "start-tainted"]
Distribution = Literal["kubeadm", "k3s", "rke2"]

NAME = "20-trackbed-gate.conf"
TEMPLATE = archive.ROOT / "templates" / "kubelet-gate.conf"
LONGEST = 86400
# The values become part of a unit file, where white space and '%' are special.
_PATH = re.compile(r"/[\w./@+-]+")
_UNIT = re.compile(r"[\w.@:-]+\.service")


@frozen
class _Installation:
    """The unit that runs the kubelet, and the kubeconfig file that exists once the node has joined."""

    unit: str
    kubeconfig: str


DISTRIBUTIONS: dict[Distribution, _Installation] = {
    "kubeadm": _Installation("kubelet.service", "/etc/kubernetes/kubelet.conf"),
    "k3s": _Installation("k3s-agent.service", "/var/lib/rancher/k3s/agent/kubelet.kubeconfig"),
    "rke2": _Installation("rke2-agent.service", "/var/lib/rancher/rke2/agent/kubelet.kubeconfig"),
}


@frozen
class Kubelet:
    """The inventory's key.

    ``policy``: with `hold` the kubelet starts when the agent's first pass after the boot is verified. With `start-tainted` it
    also starts when the reporter has published that the node is not ready, with its taint. ``deadline``: seconds after which
    `hold` becomes `start-tainted`; None: never. ``unit`` and ``kubeconfig``: if they differ from those of the
    ``distribution``.
    """

    policy: Policy
    deadline: int | None = None
    distribution: Distribution = "kubeadm"
    unit: str | None = None
    kubeconfig: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.deadline is not None and not 1 <= self.deadline <= LONGEST:
            raise ValueError(f"deadline: {self.deadline} is not valid; give 1 to {LONGEST} seconds, or leave it out")
        if self.deadline is not None and self.policy != "hold":
            raise ValueError("deadline: it applies only to the policy 'hold'; remove it, or give that policy")
        if self.unit is not None and not _UNIT.fullmatch(self.unit):
            raise ValueError(f"unit: {self.unit!r} is not a service; give it as 'kubelet.service'")
        if self.kubeconfig is not None and not _PATH.fullmatch(self.kubeconfig):
            raise ValueError(
                f"kubeconfig: {self.kubeconfig!r} is not a valid path; give an absolute one of letters, digits and ./@+_-"
            )

    @property
    def drop_in(self) -> str:
        """The path of the drop-in."""
        return f"{units.FOLDER}/{self.unit or DISTRIBUTIONS[self.distribution].unit}.d/{NAME}"

    @property
    def text(self) -> str:
        """The drop-in's text."""
        joined = self.kubeconfig or DISTRIBUTIONS[self.distribution].kubeconfig
        seconds = 0 if self.policy == "start-tainted" else self.deadline
        let_go = "" if seconds is None else f" --let-go {seconds}"
        return TEMPLATE.read_text() + f"ExecStartPre={COMMAND} wait --first-pass --joined {joined}{let_go}\n"


KUBELET: Key[Kubelet | None] = Key("kubelet", None, record(Kubelet))


def gate() -> None:
    """Gate the kubelet as the inventory says; without the key `kubelet`, remove the gate.

    :raises DeployError: the kubelet would wait for something that never happens; naming host, key and remedy.
    """
    wanted = KUBELET.here()
    if wanted is not None and "--let-go" in wanted.text and KUBERNETES.here() is None:
        raise DeployError(
            f"{host.name}.{KUBELET.name}: on an unverified node the kubelet starts only when the reporter has published to "
            f"Kubernetes; give the key {KUBERNETES.name!r}, or the policy 'hold' without a deadline"
        )
    place(name="Kubelet's gate", want={} if wanted is None else {wanted.drop_in: wanted.text})


@operation()
def place(want: dict[str, str]) -> Commands:
    """Write the drop-in if it differs, remove others of Trackbed's, and reload systemd. The kubelet is not restarted."""
    have = host.get_fact(units.DropIns, file=NAME)
    if have == want:
        host.noop("the kubelet's gate is up to date")
    elif not systemd_reload.deferred("the kubelet's gate"):
        yield from replace(have, want, systemd_reload.RELOAD)
