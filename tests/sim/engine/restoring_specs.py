"""Random specs of all kinds whose values are restored when they leave the spec."""

import random
from functools import partial
from typing import Any

from agent.spec.node import NodeSpec, SpecError, from_mapping
from tests.sim.two_nics import MAC0, MAC1, NAME0, NAME1, PF0, PF1

PFS = {PF0: NAME0, PF1: NAME1}
MACS = {PF0: MAC0, PF1: MAC1}
# The first two are those of igb. The first NIC may have two modes, as those of bnxt.
CHANNELS = ({"combined": 1}, {"combined": 2}, {"rx": 1, "tx": 2}, {"rx": 2, "tx": 2}, {"rx": 1})
SYSCTLS = {
    "net.core.somaxconn": ("512", "4096"),
    "vm.dirty_bytes": ("1073741824",),
    "net.ipv6.conf.all.disable_ipv6": ("0", "1"),
    "net.ipv6.conf.lo.disable_ipv6": ("0", "1"),
    "net.ipv4.ip_forward": ("0", "1"),
    f"net.ipv4.conf.{NAME0}.forwarding": ("0", "1"),
    "net.ipv4.neigh.default.base_reachable_time_ms": ("10500",),
}


def random_document(chance: random.Random, able: bool) -> dict[str, Any]:
    """A random spec that is valid. ``able``: the drivers accept every attribute of a VF."""
    while True:
        document = _document(chance, able)
        try:
            spec_of(document)
        except SpecError:
            continue
        return document


def _document(chance: random.Random, able: bool) -> dict[str, Any]:
    maybe, pick = partial(_maybe, chance), chance.choice
    nics = [_nic(chance, able, number, pf) for number, pf in enumerate(PFS) if chance.random() < 0.8]
    missing = pick([None, {"pci": "0000:99:00.0"}, {"mac": "02:00:00:00:77:77"}, {"netdev": "eth7"}, {"driver": "ice"}])
    if missing and chance.random() < 0.4:
        nics.append({"name": "missing", "select": missing, "required": False})
    return {
        "nics": nics,
        "irqs": {"pin": pick([True, False])},
        "rps": {"enable": pick([True, False]), "netdevs": pick([[], [{"match": "veth*"}]])},
        "xps": {"enable": pick([True, False])},
        "rfs": {"enable": pick([True, False])},
        "sysctls": {name: pick(values) for name, values in SYSCTLS.items() if chance.random() < 0.3},
        **maybe("module_parameters", {"nvme_core": {"io_timeout": pick(["60", "90"])}}),
        **maybe("hugepages", [{"size": "2M", "count": pick([2, 5, 200]), **maybe("numa_node", pick([0, 1]))}]),
        **maybe("rdma", {"netns_mode": "exclusive"}),
    }


def _nic(chance: random.Random, able: bool, number: int, pf: str) -> dict[str, Any]:
    maybe, pick = partial(_maybe, chance), chance.choice
    rings = {**maybe("rx", pick([512, 1024])), **maybe("tx", pick([512, 1024]))}
    features = {name: pick([True, False]) for name in ("tx-scatter-gather", "tx-tcp-segmentation", "rx-gro", "rx-all")}
    offloads = {name: on for name, on in features.items() if chance.random() < 0.3}
    roce = {
        **maybe("trust", pick(["pcp", "dscp"])),
        **maybe("pfc", pick(["3", "3-4"])),
        **maybe("ecn", pick(["3-4", "0-7"])),
        **maybe("cm_tos", pick([96, 106])),
    }
    vf = {
        **maybe("vlan", pick([5, 7, 100])),
        **maybe("spoofchk", pick([True, False])),
        **maybe("trust", pick([True, False])),
        **maybe("max_tx_rate", pick([100, 200])),
        **(maybe("min_tx_rate", 50) | maybe("link_state", pick(["enable", "disable"])) if able else {}),
        **maybe("mtu", pick([1300, 1400])),
        **maybe("txqueuelen", pick([500, 600])),
        **maybe("rings", {"rx": pick([512, 2048])}),
    }
    return {
        "name": f"rail{number}",
        "select": pick([{"pci": pf}, {"pci": pf}, {"mac": MACS[pf]}, {"netdev": PFS[pf]}]),
        "rail": number,
        **maybe("mtu", pick([4000, 9000])),
        **maybe("state", pick(["up", "down"])),
        **maybe("txqueuelen", pick([300, 400])),
        **maybe("altnames", chance.sample(["storage", "fast"], pick([1, 2]))),
        **maybe("channels", pick(CHANNELS if number == 0 else CHANNELS[:2])),
        **({"rings": rings} if rings else {}),
        **maybe("coalescing", {"rx_usecs": pick([30, 50])}),
        **({"offloads": offloads} if offloads else {}),
        **maybe(
            "napi",
            {
                "gro_flush_timeout": pick([20000, 30000]),
                **maybe("irq_suspend_timeout", 1000000),
                **maybe("threaded", True),
            },
        ),
        **maybe("max_read_request", pick([1024, 4096])),
        **({"roce": roce} if roce else {}),
        **maybe("addresses", [pick(["192.0.2.11/24", "192.0.2.12/24", "fd00::7/64"])]),
        **maybe("vfs", {"count": 2, "derive_macs": False, "defaults": vf}),
    }


def _maybe(chance: random.Random, key: str, value: Any) -> dict[str, Any]:
    return {key: value} if chance.random() < 0.4 else {}


def spec_of(document: dict[str, Any]) -> NodeSpec:
    quiet: dict[str, Any] = {"irqs": {"pin": False}, "rps": {"enable": False}}
    document = {**quiet, **document}
    document["irqs"] = {"irqbalance": "untouched", **document["irqs"]}
    return from_mapping({"node_name": "n1", "node_number": 17, **document})
