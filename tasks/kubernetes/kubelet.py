"""Gates the kubelet at boot: on a node that has joined a cluster, the kubelet starts only when the agent has verified the node.

The gate is a drop-in for the kubelet's unit. It depends on the agent's unit only by Wants= and After=, so a restart or
upgrade of the agent does not affect the kubelet. A running kubelet is never restarted for it.

The units and kubeconfig files of k3s and RKE2 are from vendor documents (docs.k3s.io, docs.rke2.io); not run.
"""

from __future__ import annotations

import re
from typing import Literal

from attrs import field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.exceptions import DeployError
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.spec.validators import Matches, Within
from tasks.common import archive, systemd_reload, units
from tasks.common.commands import Commands, refuse
from tasks.common.data import Key, record
from tasks.common.facts import Lines
from tasks.common.status import COMMAND
from tasks.common.texts import replace
from tasks.kubernetes import KUBERNETES

Policy = Literal["hold", "start-tainted"]
Distribution = Literal["kubeadm", "k3s", "rke2"]

NAME = "20-trackbed-gate.conf"
TEMPLATE = archive.ROOT / "templates" / "kubelet-gate.conf"
# The values become part of a unit file, where white space and '%' are special.
_path = Matches(re.compile(r"/[\w./@+-]+"), "give an absolute path of letters, digits and ./@+_-")
_unit = Matches(re.compile(r"[\w.@:-]+\.service"), "give a service, as 'kubelet.service'")


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
    deadline: int | None = field(default=None, validator=Within(1, 86400, "seconds"))
    distribution: Distribution = "kubeadm"
    unit: str | None = field(default=None, validator=_unit)
    kubeconfig: str | None = field(default=None, validator=_path)

    def __attrs_post_init__(self) -> None:
        if self.deadline is not None and self.policy != "hold":
            raise ValueError("deadline: it applies only to the policy 'hold'; remove it, or give that policy")

    @property
    def gated(self) -> str:
        """The unit that waits."""
        return self.unit or DISTRIBUTIONS[self.distribution].unit

    @property
    def joined(self) -> str:
        """The file that exists once the node has joined."""
        return self.kubeconfig or DISTRIBUTIONS[self.distribution].kubeconfig

    @property
    def drop_in(self) -> str:
        """The path of the drop-in."""
        return f"{units.FOLDER}/{self.gated}.d/{NAME}"

    @property
    def text(self) -> str:
        """The drop-in's text."""
        seconds = 0 if self.policy == "start-tainted" else self.deadline
        let_go = "" if seconds is None else f" --let-go {seconds}"
        return TEMPLATE.read_text() + f"ExecStartPre={COMMAND} wait --first-pass --joined {self.joined}{let_go}\n"


OTHERS = (
    *(
        f"{name}.service"
        for name in ("kubelet", "k3s-agent", "k3s", "rke2-agent", "rke2-server", "k0sworker", "k0scontroller")
    ),
    *(f"snap.{name}.service" for name in ("microk8s.daemon-kubelite", "kubelet-eks.daemon")),
)
"""Units that run a kubelet."""

# With another data-dir, k3s and RKE2 have the kubeconfig there. Theirs may start no process of the kubelet's own.
_TARGET = r"""
root=$1 unit=$2 joined=$3; shift 3
if ! systemctl --quiet is-active "$unit"; then
  for other; do if systemctl --quiet is-active "$other"; then echo "unit $other"; fi; done
  exit 0
fi
{
  for process in $(pgrep -x kubelet); do
    tr '\0' '\n' <"$root/proc/$process/cmdline" | sed -n 's/^--kubeconfig=//p; /^--kubeconfig$/{n;p}'
  done
  case $unit in k3s* | rke2*)
    sed -n "s|^data-dir: *[\"']\{0,1\}\([^\"' ]*\).*|\1/agent/kubelet.kubeconfig|p" \
      "$root/etc/rancher/${unit%%[.-]*}/config.yaml" ;;
  esac
} 2>/dev/null | sort -u | while read -r named; do
  [ "$named" = "$joined" ] || [ "$named" -ef "$joined" ] || echo "kubeconfig $named"
done
"""


class GateFaults(Lines):
    """Why a gate would hold nothing: `unit NAME` if that runs a kubelet, or `kubeconfig PATH` if the kubelet has that one."""

    def command(self, unit: str, joined: str) -> StringCommand:
        """Ask systemd, and read the kubelet's command line and k3s' and RKE2's configuration."""
        return self.script(_TARGET, "", unit, joined, *(each for each in OTHERS if each != unit))


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
    place(name="Kubelet's gate", wanted=wanted)


@operation()
def place(wanted: Kubelet | None) -> Commands:
    """Write the drop-in if it differs, remove others of Trackbed's, and reload systemd. The kubelet is not restarted.

    Refuse a gate that would hold nothing, since another unit runs the kubelet, or the file never exists.
    """
    want = {} if wanted is None else {wanted.drop_in: wanted.text}
    if wanted and (faults := host.get_fact(GateFaults, unit=wanted.gated, joined=wanted.joined)):
        key, _, value = faults[0].partition(" ")
        expected = wanted.gated if key == "unit" else wanted.joined
        yield refuse(
            f"kubelet: this node's kubelet has the {key} {value}, and not {expected}, so the gate would hold nothing; give "
            f"kubelet.{key} {value!r}"
        )
        return
    have = host.get_fact(units.DropIns, file=NAME)
    if have == want:
        host.noop("the kubelet's gate is up to date")
    elif not systemd_reload.deferred("the kubelet's gate"):
        yield from replace(have, want, systemd_reload.RELOAD)
