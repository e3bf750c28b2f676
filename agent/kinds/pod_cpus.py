"""The CPUs of the pod that has a VF, if the spec has the VF's interrupts go there (``irqs_on_pod_cpus``).

The kubelet tells both in one answer, which device and which CPUs a pod has, before the VF's netdev goes to the pod. An
annotation of the pod would need the API server, and a process of the pod in the netdev's namespace starts only later.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.hardware.functions import is_away
from agent.machine import Machine
from agent.state.wanted import Wanted

KEY = "irqs_on_pod_cpus"


def with_pods(
    machine: Machine, want: Wanted, functions: Mapping[str, Mapping[str, str]]
) -> dict[str, frozenset[int] | None]:
    """The CPUs that the pod of each such VF among these functions has for itself, by target; None: the kubelet does not say.

    A kubelet that is stopped or has just started knows of no devices at all.
    """
    asked = {address: want.nics[address].vf_settings(KEY) for address in functions}
    away = {
        target: pci
        for address, of_pf in functions.items()
        for target, pci in of_pf.items()
        if asked[address].get(target) and is_away(machine.files, pci)
    }
    if not away:
        return {}
    try:
        known = machine.kubelet.cpus()
    except OSError:
        known = {}
    return {target: known.get(pci, frozenset()) if known else None for target, pci in away.items()}
