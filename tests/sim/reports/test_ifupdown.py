"""Public reports of ifupdown, its successors and netplan: which netdevs they configure, by their files."""

import pytest

from agent.engine.converge import Pass
from tests.sim.engine.one_nic import wanting
from tests.sim.kernel import Kernel
from tests.sim.passes import settle
from tests.sim.two_nics import MAC0, NAME0, PF0, two_nics

ADDRESS = "192.0.2.11/24"
INTERFACES = "/etc/network/interfaces"
PROFILES, UUID = "/run/NetworkManager/system-connections", "1cdb3920-82f6-3a30-a05d-51bf770adb39"
WANTS = "/etc/systemd/system/{}.target.wants/networking.service"
STANZA = f"auto {NAME0}\niface {NAME0} inet static\n  address 192.0.2.99/24\n"
DHCP = f"auto {NAME0}\niface {NAME0} inet dhcp\n"


def run(files: dict[str, str], target: str = "multi-user") -> Pass:
    kernel = two_nics()
    for path, text in {**files, WANTS.format(target): ""}.items():
        kernel.tree.put(path, text)
    nic = {"name": "rail0", "select": {"pci": PF0}, "rail": 0, "addresses": [ADDRESS]}
    return settle(kernel, wanting(nic))


@pytest.mark.parametrize(
    ("files", "target", "place"),
    [
        pytest.param({INTERFACES: STANZA.replace(" inet static", "")}, "multi-user", INTERFACES, id="ifupdown2-48"),
        pytest.param({INTERFACES: STANZA.replace(" static", "")}, "multi-user", INTERFACES, id="ifupdown2-70"),
        # How ifupdown2's own unit is enabled.
        pytest.param({INTERFACES: STANZA}, "basic", INTERFACES, id="ifupdown2-177"),
        pytest.param(
            {INTERFACES: f"{STANZA}iface {NAME0} inet6 manual\n"}, "multi-user", INTERFACES, id="ifupdown-ng-131"
        ),
        pytest.param(
            {INTERFACES: "source interfaces.d/*", f"{INTERFACES}.d/fabric.cfg": STANZA},
            "multi-user",
            f"{INTERFACES}.d/fabric.cfg",
            id="ifupdown-ng-225",
        ),
        pytest.param(
            {INTERFACES: "source-directory /run/network/interfaces.d\n", "/run/network/interfaces.d/fabric": DHCP},
            "multi-user",
            "/run/network/interfaces.d/fabric",
            id="ifupdown2-191",
        ),
    ],
)
def test_a_netdev_of_ifupdown_gets_no_address_of_the_agent(files: dict[str, str], target: str, place: str) -> None:
    outcomes = {(each.result, each.error) for each in run(files, target).outcomes if each.change.kind == "addresses"}
    assert {(result, NAME0 in error, f"({place})" in error) for result, error in outcomes} == {("blocked", True, True)}


@pytest.mark.parametrize("kind", [pytest.param("", id="fedora-coreos-tracker-1383"), "bond"])
def test_a_netdev_below_another_one_leaves_the_addresses_to_that(kernel: Kernel, kind: str) -> None:
    """On Azure a VF is below a netdev of hv_netvsc, and no kind of master is known of it."""
    kernel.enslave(PF0, "eth0", kind)
    nic = {"name": "rail0", "select": {"pci": PF0}, "rail": 0, "addresses": [ADDRESS]}
    made = settle(kernel, wanting(nic))
    said = {(each.error, each.remedy) for each in made.outcomes if each.change.kind == "addresses"}
    assert said == {(f"{NAME0} is a member of eth0", f"leave the addresses to eth0, or take {NAME0} out of it")}
    assert kernel.routing.assigned == {}


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({INTERFACES: "allow-hotplug eth0\niface eth0 inet dhcp\n"}, id="cloud-init-3596"),
        pytest.param({INTERFACES: "iface lo inet loopback\n", f"{INTERFACES}.d/fabric": DHCP}, id="ifupdown2-51"),
        pytest.param({INTERFACES: "", f"{INTERFACES}.d/50-cloud-init.cfg": DHCP}, id="cloud-init-3475"),
        pytest.param(
            {INTERFACES: f"source-directory {INTERFACES}.d", f"{INTERFACES}.d/50-cloud-init.cfg": DHCP},
            id="cloud-init-3164",
        ),
        pytest.param(
            {INTERFACES: f"source {INTERFACES}.d/*.cfg", f"{INTERFACES}.d/fabric": DHCP}, id="cloud-init-2637"
        ),
    ],
)
def test_a_stanza_that_ifupdown_does_not_read_keeps_no_address_away(files: dict[str, str]) -> None:
    assert {each.result for each in run(files).outcomes if each.change.kind == "addresses"} == {"applied"}


@pytest.mark.parametrize(
    ("file", "profile", "by_netplan"),
    [
        pytest.param(f"netplan-NM-{UUID}", f"[connection]\nuuid={UUID}\n", True, id="netplan-189"),
        pytest.param("netplan-fabric", f"[connection]\nid=fabric\nuuid={UUID}\n", True, id="iiab-4267"),
        pytest.param("netplan-fabric", f"[ethernet]\nmac-address={MAC0.upper()}\n", True, id="netplan-278"),
        ("netplan-all", "[match]\ninterface-name=eth*;en*;\n", True),
        # The ID of one NIC may be the name of another one.
        (f"netplan-{NAME0}", "[ethernet]\nmac-address=02:00:00:00:99:99\n", False),
        ("cloud-init-fabric", f"[connection]\nuuid={UUID}\n", False),
    ],
)
def test_netplan_s_profile_of_a_netdev_is_found_whatever_its_id_is(file: str, profile: str, by_netplan: bool) -> None:
    managed = f"[device]\nmanaged=true\nconnection-uuid={UUID}\n"
    path = f"{PROFILES}/{file}.nmconnection"
    made = run({f"/run/NetworkManager/devices/{two_nics().netdev(PF0).ifindex}": managed, path: profile})
    expected = f"netplan configures {NAME0}, by NetworkManager ({path})"
    outcomes = {(each.result, each.error) for each in made.outcomes if each.change.kind == "addresses"}
    assert outcomes == {("blocked", expected if by_netplan else f"NetworkManager configures {NAME0}")}
