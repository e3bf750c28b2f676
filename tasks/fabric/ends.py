"""Makes the ends of a node for the fabric test from what its commands print."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from typing import Any

import cattrs

from agent.report.fabric import identity
from agent.spec.node import NodeSpec
from agent.spec.selector import INDEX
from fleet.fabric.ends import OLD_SOURCE_OPTION, End
from tasks.drivers.gpu_driver import modules as gpu

ROUTED_GIDS = ("RoCE v2",)
"""The types of GIDs that are IP addresses by which packets are routed."""

FACTS = (
    gpu.GPUS
    + """
agent=$1; shift
[ -x "$agent" ] || exit 0
for program; do if command -v "$program" > /dev/null; then echo "program $program"; fi; done
options=$(ib_send_bw --help 2>&1 || true)
case "$options" in *--bind_source_ip*) echo "source --bind_source_ip" ;; esac
case "$options" in *--ipv6-addr*) echo ipv6 ;; esac
python=$(command -v python3 || true)
if [ "$python" ] && "$python" -I -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("mpi4py"))'; then
  echo "program mpi4py"
fi
ip -o addr show | while read -r _ _ _ a _; do echo "address ${a%%/*}"; done
for d in /sys/bus/pci/devices/*; do
  a=${d##*/}
  if [ -e "$d/net" ] || [ -e "$d/infiniband" ]; then
    m=$(basename "$(readlink "$d/driver/module")" 2>/dev/null || true)
    v=; if [ -e "/sys/module/$m/srcversion" ]; then read -r v < "/sys/module/$m/srcversion"; fi
    echo "cpus $a $(cat "$d/local_cpulist") ${v:-$(uname -r)}"
  fi
done
nvidia_gpus '' | while read -r a _; do echo "gpu $a $(cat "/sys/bus/pci/devices/$a/numa_node")"; done
echo inspection
"$agent" inspect --json
"""
)


_CPUS = re.compile("[0-9,-]+")
"""A list of CPUs in sysfs."""


class NodeEnds(dict[str, Any]):
    """The JSON of `trackbed inspect`, with ``cpus`` and ``driver_version`` by PCI address and ``gpus`` by NUMA node.

    ``programs``: the installed programs of the collective stage. ``source_option``: the option of its perftest for a client's
    own address. ``ipv6``: whether its perftest can connect by IPv6 addresses. ``addresses``: those of all
    netdevs in its own network namespace.
    """

    @classmethod
    def parse(cls, output: list[str]) -> NodeEnds:
        """Parse what :data:`FACTS` prints.

        :raises ValueError: the node has no agent, or the agent printed nothing.
        """
        if "inspection" not in output:
            raise ValueError("it has no agent of Trackbed; run deploy.py first")
        at = output.index("inspection")
        lines = [line.split() for line in output[:at]]
        answer = json.loads("\n".join(output[at + 1 :]))
        answer["cpus"] = {line[1]: line[2] for line in lines if len(line) == 4 and _CPUS.fullmatch(line[2])}
        answer["driver_version"] = {line[1]: line[-1] for line in lines if line[0] == "cpus"}
        answer["programs"] = sorted(line[1] for line in lines if line[0] == "program")
        answer["source_option"] = next((line[1] for line in lines if line[0] == "source"), OLD_SOURCE_OPTION)
        answer["ipv6"] = ["ipv6"] in lines
        answer["addresses"] = {_plain(line[1]) for line in lines if line[0] == "address"}
        answer["gpus"] = {line[2]: line[1] for line in reversed(lines) if line[0] == "gpu"}
        return cls(answer)


def read_ends(
    node: str,
    printed: list[str] | None,
    rails: Mapping[str, int],
    floors: Mapping[str, float],
    with_rdma: Collection[str],
) -> tuple[list[End], dict[str, str]]:
    """The ends of a node, from what :data:`FACTS` printed, and why others of its NICs have none.

    :param printed: None: the command failed.
    :param with_rdma: the names, or patterns of names, of the NICs that should have an end.
    :raises ValueError: it cannot be read. Root on a node can answer anything, and so excludes only this node.
    """
    if printed is None:
        raise ValueError("its NICs cannot be read")
    try:
        made, without = ends_of(node, NodeEnds.parse(printed), rails, floors)
        untested = {nic: why for nic, why in without.items() if any(_is_of(nic, name) for name in with_rdma)}
    except (LookupError, TypeError, AttributeError, RecursionError, cattrs.BaseValidationError) as error:
        raise ValueError(f"its NICs cannot be read: {type(error).__name__} in its answer") from None
    if not made:
        reasons = [f"{nic}: {why}" for nic, why in sorted(without.items()) if why != NO_END]
        raise ValueError(
            "; ".join(reasons) or "no NIC of its spec has an RDMA device with an active port and an IP address"
        )
    return made, untested


def _is_of(nic: str, name: str) -> bool:
    """Whether the spec's entry of this name, which may be a pattern, stands for the NIC."""
    return re.fullmatch(re.escape(name).replace(re.escape(INDEX), "[0-9]+"), nic) is not None


def ends_of(
    node: str, facts: Mapping[str, Any], rails: Mapping[str, int], floors: Mapping[str, float]
) -> tuple[list[End], dict[str, str]]:
    """The ends of a node, and why each other NIC has none.

    A NIC's end is the RDMA device of its PF, or of the first VF with an address if the PF has none.
    """
    owned: list[End] = []
    without: dict[str, str] = {}
    for function in facts["functions"]:
        nic = function["nic"]
        if nic is None:
            continue
        reasons = set()
        for owner in (function, *function["vfs"]):
            end = _end(node, nic, owner, facts)
            if isinstance(end, End):
                owned.append(end)
                break
            reasons.add(end)
        else:
            without[nic] = ONLY_IPV6 if ONLY_IPV6 in reasons else NO_END
    ordered = sorted(owned, key=lambda end: end.pci)
    return [
        cattrs.structure({**cattrs.unstructure(end), "rail": rails.get(end.nic, place), "floors": dict(floors)}, End)
        for place, end in enumerate(ordered)
    ], without


NO_END = "none of its RDMA devices has an active port and an IP address of the node's own"
ONLY_IPV6 = "it has only IPv6 addresses, which need perftest 23.07 or newer on the node"


def _end(node: str, nic: str, owner: Mapping[str, Any], facts: Mapping[str, Any]) -> End | str:
    """The end of a function, or why it has none."""
    for device in owner["rdma"]:
        for port in device["ports"]:
            reached = _address(device, port, owner, facts["addresses"])
            if port["state"] != "ACTIVE" or reached is None:
                continue
            address, gid = reached
            if ":" in address and not facts["ipv6"]:
                return ONLY_IPV6
            return End(
                node=node,
                nic=nic,
                rail=0,
                group=f"{owner['vendor']}:{owner['device']} {port['rate'] or ''}".strip(),
                pci=owner["address"],
                device=device["name"],
                port=port["number"],
                netdev=port["netdev"] or "",
                address=address,
                gid_index=gid,
                cpus=facts["cpus"].get(owner["address"], ""),
                gpu=facts["gpus"].get(str(owner["numa_node"])),
                programs=tuple(facts["programs"]),
                source_option=facts["source_option"],
                identity=identity(
                    owner["driver"],
                    facts["driver_version"].get(owner["address"]),
                    device["firmware"],
                    device["node_guid"],
                    port["link_layer"],
                    port["rate"],
                ),
            )
    return NO_END


def _address(
    device: Mapping[str, Any], port: Mapping[str, Any], owner: Mapping[str, Any], of_node: Collection[str]
) -> tuple[str, int | None] | None:
    """The IP address of a port, and on RoCE the index of its GID. IPv4 is preferred, as perftest uses it by default."""
    gids = [gid for gid in port["gids"] if gid["type"] in ROUTED_GIDS and not gid["address"].startswith("fe80:")]
    if device["transport"] == "RoCE":
        # sysfs also shows the GIDs of a VF in a pod, whose addresses are the pod's: a test would load the pod's VF.
        gids = [gid for gid in gids if _plain(gid["address"]) in of_node]
        best = min(gids, key=lambda gid: (":" in gid["address"], gid["index"]), default=None)
        return (_plain(best["address"]), best["index"]) if best else None
    addresses = [each.partition("/")[0] for netdev in owner["netdevs"] for each in netdev["addresses"]]
    usable = [each for each in addresses if not each.startswith("fe80:")]
    return (_plain(min(usable, key=lambda each: ":" in each)), None) if usable else None


def _plain(address: str) -> str:
    """The address in its usual form. It is checked, since it goes onto command lines and into files of other nodes.

    :raises ValueError: it is not an IP address, or it has a scope, which may be any text.
    """
    if "%" in address:
        raise ValueError(f"{address[:60]!r} is an address with a scope")
    return str(ip_address(address))


def with_rdma(spec: NodeSpec) -> tuple[str, ...]:
    """The names, or patterns of names, of the NICs of which the spec requires RDMA devices."""
    return tuple(nic.name for nic in spec.nics if nic.rdma is not None and nic.required)


def rails_of(spec: NodeSpec) -> dict[str, int]:
    """The rails that the spec gives, by the names of the NICs."""
    return {nic.name: nic.rail for nic in spec.nics if isinstance(nic.rail, int)}
