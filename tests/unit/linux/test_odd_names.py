"""Names of netdevs that are not UTF-8: a pod with CAP_NET_ADMIN may give its VF such a name, and the VF comes back with it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from agent import linux
from agent.engine.context import Goal, Memory
from agent.engine.converge import converge
from agent.engine.originals import ORIGINALS, Originals
from agent.hardware.functions import ifindex_of, netdev_of
from agent.report.records import Outcome, from_plain, to_plain
from agent.service.activity import Activity, View
from agent.service.traced_machine import traced
from agent.spec.node import from_mapping
from bench.namespace import ADDRESS, devices
from cli.inspection import inspect, render
from tests.private_namespace import in_namespace
from tests.sim.kernel import Kernel
from tests.sim.two_nics import PF0, two_nics

ODD = b"eth\xff\xc3".decode(errors="surrogateescape")
VF = "0000:21:10.0"


def spec(**vf: object) -> dict[str, object]:
    return {
        "node_name": "n1",
        "nics": [{"name": "rail0", "select": {"pci": PF0}, "vfs": {"count": 1, "defaults": vf}}],
        "rps": {"enable": True, "netdevs": [{"match": "veth*"}]},
    }


@pytest.fixture
def kernel() -> Kernel:
    return two_nics()


def test_a_vf_that_comes_back_with_an_odd_name_is_configured(kernel: Kernel, tmp_path: Path) -> None:
    originals = Originals.load(tmp_path / ORIGINALS)
    view = View.new()
    seen = traced(kernel.machine(), Activity.at(view.descriptor))

    def follow(**vf: object) -> list[str]:
        result = converge(seen, Goal(from_mapping(spec(**vf))), Memory(lambda: 0.0, originals=originals))
        # As the worker sends it and the supervisor reads it.
        for outcome in result.outcomes:
            text = json.dumps(to_plain(outcome))
            from_plain(json.loads(text), Outcome).change.target.encode()
        return [str(outcome.change) for outcome in result.outcomes if outcome.result != "applied"]

    follow()
    kernel.add_virtual("veth" + ODD[3:])
    kernel.move_away(VF)
    kernel.come_back(VF, ODD)
    assert follow(mtu=1400) == []
    assert kernel.netdev(VF).mtu == 1400
    Originals.load(tmp_path / ORIGINALS)
    assert follow() == []
    assert Originals.load(tmp_path / ORIGINALS).condition is None
    view.close()


def test_inspect_shows_an_odd_name_with_escapes(kernel: Kernel) -> None:
    converge(kernel.machine(), Goal(from_mapping(spec())), Memory(lambda: 0.0))
    kernel.move_away(VF)
    kernel.come_back(VF, ODD + "\x1b[2J")
    shown = render(inspect(kernel.machine(), None))
    assert r"eth\udcff\udcc3\x1b[2J" in shown
    shown.encode()


@in_namespace("ip link set lo up; ip link add fab0 type veth peer name fab1")
def test_this_kernel_gives_the_same_odd_name_in_sysfs_and_netlink() -> None:
    with devices({ADDRESS: "fab0"}):
        real = linux.machine()
        index = ifindex_of(real.files, ADDRESS)
        assert netdev_of(real.files, ADDRESS) == "fab0"
        subprocess.run(["ip", "link", "set", "fab0", "name", os.fsencode(ODD)], check=True)
        assert ODD in real.files.names("/sys/class/net")
        link = real.netlink.link(ODD)
        assert link is not None
        assert (link.ifindex, link.name) == (index, ODD)
        real.netlink.rename(index, "fab0")
        assert netdev_of(real.files, ADDRESS) == "fab0"
