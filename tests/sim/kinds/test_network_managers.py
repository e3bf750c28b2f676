"""Who configures a netdev, by the managers' own files: that netdev gets no address from the agent, and the remedy is named."""

from typing import Any

import pytest

from agent.engine.converge import Pass
from agent.engine.dry_run import dry_run
from agent.engine.originals import Originals
from agent.engine.retry import Failures
from agent.report.verdict import is_ready
from agent.spec.addresses import TABLES
from agent.spec.node import NodeSpec
from tests.sim.kernel import Kernel
from tests.sim.passes import condition, rail0, settle, undone

PF = "0000:21:00.0"
NETWORKD, NM = "/run/systemd/netif/links", "/run/NetworkManager/devices"
WANTS = "/etc/systemd/system/multi-user.target.wants"
UNMANAGED = "# This is private data. Do not parse.\nADMIN_STATE=unmanaged\nOPER_STATE=carrier\n"
CONFIGURED = "ADMIN_STATE=configured\nOPER_STATE=routable\nNETWORK_FILE={}\n"
STANZA = "auto lo\niface lo inet loopback\n\nallow-hotplug enp33s0\niface enp33s0 inet {}\n"


def spec(*addresses: Any) -> NodeSpec:
    return rail0(rail=0, addresses=list(addresses))


def run(kernel: Kernel, *addresses: Any, **more: Any) -> Pass:
    return settle(kernel, spec(*addresses), **more)


def put(kernel: Kernel, **files: str) -> None:
    """Files by their path; `IFINDEX` in it is the netdev's."""
    for path, text in files.items():
        kernel.tree.put(path.replace("IFINDEX", str(kernel.netdev(PF).ifindex)), text)


OF_NETWORKD, OF_NM = f"{NETWORKD}/IFINDEX", f"{NM}/IFINDEX"
FABRIC, NETPLAN = "/etc/systemd/network/20-fab.network", "/run/systemd/network/10-netplan-enp33s0.network"
INTERFACES, STATE = "/etc/network/interfaces", "/run/network/ifstate"
MANAGED = "[device]\nmanaged=true\n"
BY_NM = ("NetworkManager configures enp33s0", "nmcli device set enp33s0 managed no")


@pytest.mark.parametrize(
    ("files", "who", "remedy"),
    [
        (
            {OF_NETWORKD: CONFIGURED.format(FABRIC)},
            f"systemd-networkd configures enp33s0 ({FABRIC})",
            "networkctl reload",
        ),
        ({OF_NETWORKD: "ADMIN_STATE=configuring\n"}, "systemd-networkd configures enp33s0 (no file)", "Unmanaged=yes"),
        pytest.param(
            {OF_NETWORKD: CONFIGURED.format(NETPLAN)},
            f"netplan configures enp33s0, by systemd-networkd ({NETPLAN})",
            "netplan apply",
            id="cluster-api-provider-hetzner-481",
        ),
        ({OF_NM: f"{MANAGED}connection-uuid=7b0c\n"}, *BY_NM),
        ({OF_NM: MANAGED, f"{WANTS}/systemd-networkd.service": ""}, *BY_NM),
        (
            {INTERFACES: STANZA.format("dhcp"), f"{WANTS}/networking.service": ""},
            f"ifupdown configures enp33s0 ({INTERFACES})",
            "ifdown enp33s0",
        ),
        (
            {
                INTERFACES: f"source {INTERFACES}.d/*\n",
                f"{INTERFACES}.d/fab": STANZA.format("static"),
                STATE: "lo=lo\nenp33s0=enp33s0",
            },
            f"ifupdown configures enp33s0 ({INTERFACES}.d/fab)",
            "ifdown enp33s0",
        ),
        ({f"{STATE}.enp33s0": "enp33s0"}, "ifupdown configures enp33s0 (/run/network)", "ifdown enp33s0"),
    ],
)
def test_a_netdev_that_a_manager_configures_gets_nothing_and_the_manager_is_named(
    kernel: Kernel, files: dict[str, str], who: str, remedy: str
) -> None:
    put(kernel, **files)
    result = run(kernel, "192.0.2.11/24")
    outcomes = [outcome for outcome in result.outcomes if outcome.change.kind == "addresses"]
    assert {(outcome.result, outcome.error) for outcome in outcomes} == {("blocked", who)}
    assert all(remedy in outcome.remedy for outcome in outcomes)
    assert (kernel.netlink.addresses(), kernel.netlink.rules(), kernel.netlink.routes({479100})) == ({}, (), ())
    assert kernel.files.read("/proc/sys/net/ipv4/conf/enp33s0/arp_ignore") == "0"
    # The deploy refuses such a plan before it writes the spec.
    assert any(who in error and remedy in error for error in dry_run(kernel.machine(), spec("192.0.2.11/24")).errors)
    assert is_ready(run(kernel).conditions)


@pytest.mark.parametrize(
    "files",
    [
        {OF_NETWORKD: UNMANAGED, f"{WANTS}/systemd-networkd.service": ""},
        {f"{NETWORKD}/99": CONFIGURED.format("x.network"), OF_NETWORKD: UNMANAGED},
        {OF_NM: "[device]\nmanaged=false\n", f"{WANTS}/NetworkManager.service": ""},
        {OF_NM: "[device]\nperm-hw-addr-fake=02:00:00:00:00:01\n"},
        {f"{NM}/99": MANAGED, f"{WANTS}/NetworkManager.service": ""},
        {INTERFACES: STANZA.format("manual"), STATE: "enp33s0=enp33s0"},
        {INTERFACES: STANZA.format("dhcp")},
        {INTERFACES: STANZA.format("dhcp").replace("enp33s0", "enp33s0v0"), f"{WANTS}/networking.service": ""},
    ],
    ids=["networkd", "networkd-other", "nm", "nm-unknown", "nm-other", "manual", "no-ifupdown", "other-stanza"],
)
def test_a_netdev_that_no_manager_configures_gets_its_address(kernel: Kernel, files: dict[str, str]) -> None:
    put(kernel, **files)
    assert is_ready(run(kernel, "192.0.2.11/24").conditions)
    assert kernel.netlink.addresses() == {kernel.netdev(PF).ifindex: ("192.0.2.11/24",)}


@pytest.mark.parametrize(
    ("enabled", "decided", "who"),
    [
        ("systemd-networkd", {OF_NETWORKD: UNMANAGED}, "systemd-networkd has not decided yet"),
        ("NetworkManager", {f"{NM}/2": "[device]\n"}, "NetworkManager has not started yet and may configure enp33s0"),
    ],
)
def test_at_boot_a_manager_that_is_to_start_is_waited_for(
    kernel: Kernel, enabled: str, decided: dict[str, str], who: str
) -> None:
    put(kernel, **{f"{WANTS}/{enabled}.service": ""})
    failures = Failures()
    result = run(kernel, "192.0.2.11/24", failures=failures)
    assert {outcome.result for outcome in result.outcomes if outcome.change.kind == "addresses"} == {"blocked"}
    assert who in condition(result, "Converged").message
    assert kernel.netlink.addresses() == {}
    # There is no event when the network manager has decided, so the agent reads again.
    again = failures.next_try()
    assert again is not None
    put(kernel, **decided)
    assert is_ready(run(kernel, "192.0.2.11/24", failures=failures, now=again).conditions)
    assert failures.next_try() is None


def test_a_change_that_a_manager_blocks_for_good_is_not_tried_again(kernel: Kernel) -> None:
    put(kernel, **{OF_NM: MANAGED})
    failures = Failures()
    run(kernel, "192.0.2.11/24", failures=failures)
    assert failures.next_try() is None


def test_a_masked_manager_is_not_waited_for(kernel: Kernel) -> None:
    put(kernel, **{f"{WANTS}/NetworkManager.service": ""})
    kernel.tree.link("/etc/systemd/system/NetworkManager.service", "/dev/null")
    assert is_ready(run(kernel, "192.0.2.11/24").conditions)


def test_a_netdev_in_a_vrf_gets_its_addresses_and_the_vrf_has_its_routes(kernel: Kernel) -> None:
    kernel.enslave(PF, "vrf0", "vrf")
    assert is_ready(run(kernel, "192.0.2.11/24", "fd00::11/64").conditions)
    assert kernel.netlink.addresses() == {kernel.netdev(PF).ifindex: ("192.0.2.11/24", "fd00::11/64")}
    assert kernel.tree.files["/proc/sys/net/ipv4/conf/enp33s0/arp_ignore"] == "1"
    assert (kernel.netlink.routes(TABLES), kernel.netlink.rules()) == ((), ())
    assert not run(kernel, "192.0.2.11/24", "fd00::11/64").outcomes


def test_a_gateway_of_a_netdev_in_a_vrf_is_left_to_the_vrf(kernel: Kernel) -> None:
    kernel.enslave(PF, "vrf0", "vrf")
    (outcome,) = undone(run(kernel, {"address": "192.0.2.11/24", "gateway": "192.0.2.1"}))
    assert (outcome.result, "via 192.0.2.1 " in outcome.change.field) == ("blocked", True)
    assert "enp33s0 is in the VRF vrf0" in outcome.error and "take gateway out" in outcome.remedy


def test_the_agent_s_address_is_removed_even_if_a_manager_configures_the_netdev_now(kernel: Kernel) -> None:
    originals = Originals()
    assert is_ready(run(kernel, "192.0.2.11/24", originals=originals).conditions)
    put(kernel, **{OF_NM: MANAGED})
    assert is_ready(run(kernel, originals=originals).conditions)
    assert (kernel.netlink.addresses(), kernel.netlink.rules()) == ({}, ())
