"""Warns of a kubelet that does not start again after a change of huge pages or CPUs, since it compares them with a state file.

See validateState in pkg/kubelet/cm/memorymanager/policy_static.go and pkg/kubelet/cm/cpumanager/policy_static.go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.spec.node import NodeSpec
from tasks.common.commands import Commands, warn
from tasks.common.facts import Lines
from tasks.host.sysctls import KUBELET_FILES

CPUS = re.compile(r"nosmt(=force)?|(maxcpus|nr_cpus|possible_cpus)=.*")
"""Kernel arguments that change which CPUs there are."""

# A unit may remove the file before each start, as that of OpenShift does.
_STATES = (
    r"""
cd "$1/"
for state in memory cpu; do
  pattern="(^|[{,])[[:space:]]*\"?${state}ManagerPolicy\"?:[[:space:]]*\"?[Ss]tatic|$state-manager-policy[= ]\"?[Ss]tatic"
"""
    f"""  if grep -qsrE -e "$pattern" -- {KUBELET_FILES} &&
    ! grep -qsr -- "${{state}}_manager_state" etc/systemd/system usr/lib/systemd/system lib/systemd/system
  then echo "$state"; fi
done
"""
)


class KubeletStates(Lines):
    """`memory` and `cpu`: the state files that the node's kubelet compares with its memory and CPUs when it starts."""

    shell = _STATES
    words = ("",)


def changes(spec: NodeSpec, arguments: Iterable[str]) -> dict[str, str]:
    """What this spec and these kernel arguments may change on the node, by the state file that does not match afterwards.

    :param arguments: the kernel arguments that are wanted.
    """
    cpus = {"cpu": "CPUs"} if any(map(CPUS.fullmatch, arguments)) else {}
    return {"memory": "huge pages", **cpus} if spec.hugepages else cpus


@operation()
def check(changed: dict[str, str]) -> Commands:
    """Warn of each state file on the node that will not match after a change.

    :param changed: the result of :func:`changes`.
    """
    for state in host.get_fact(KubeletStates):
        if (what := changed.get(state)) and host.state.is_executing:
            warn(
                host,
                f"this node's kubelet has a static {state}ManagerPolicy: after a change of {what} it does not start until "
                f"{state}_manager_state in its folder is removed, on a drained node; let its unit do so (ExecStartPre=/bin/rm "
                f"-f /var/lib/kubelet/{state}_manager_state)",
            )
    host.noop("the kubelet's state files are looked at only")
    yield from ()
