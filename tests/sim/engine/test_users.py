"""Who uses a function, and who owns it, by each source."""

import pytest
from attrs import evolve

from agent.engine.users import User, users, with_affected
from agent.hardware.functions import discover, vf_addresses
from agent.machine import Link, QueuePair, QueueUser, Route, Rule
from agent.report.records import Change, Disruption
from agent.spec.addresses import FIRST_TABLE
from agent.state.wanted import Wanted, resolve
from tests.sim.engine.test_disruption import PF, spec
from tests.sim.kernel import Kernel, Netdev
from tests.sim.passes import rail0, settle
from tests.sim.routing import MAIN
from tests.sim.two_nics import two_nics

VIRTUAL_MACHINE = User("qemu-system-x86 (pid 77)", owns=True)


@pytest.fixture
def kernel() -> Kernel:
    kernel = two_nics()
    kernel.load_vfio()
    settle(kernel, spec())
    return kernel


def wanted(kernel: Kernel) -> Wanted:
    return resolve(spec(), discover(kernel.machine()))


def users_of(kernel: Kernel) -> dict[str, tuple[User, ...]]:
    return users(kernel.machine(), wanted(kernel), PF)


def owning(kernel: Kernel) -> dict[str, tuple[User, ...]]:
    return users(kernel.machine(), wanted(kernel), PF, complete=False)


def test_a_vf_without_a_driver_is_in_no_namespace(kernel: Kernel) -> None:
    kernel.unbind(vf_addresses(kernel.files, PF)[1])
    assert users_of(kernel) == {}


@pytest.fixture
def of_vfio(kernel: Kernel) -> str:
    """The address of VF 1, which has the driver vfio-pci; the other VFs have igbvf."""
    vfs = {"count": 4, "groups": [{"index": "1", "driver": "vfio-pci"}]}
    settle(kernel, rail0(vfs=vfs))
    return vf_addresses(kernel.files, PF)[1]


@pytest.mark.parametrize(
    ("bound", "node"),
    [
        *(("vfio-pci", node) for node in ("vfio/{group}", "vfio/noiommu-{group}")),
        pytest.param("vfio-pci", "vfio/devices/vfio3", id="kubevirt-enhancements-267"),
        ("mlx5_vfio_pci", "vfio/{group}"),
        *((driver, "uio0") for driver in ("uio_pci_generic", "igb_uio")),
    ],
)
def test_a_virtual_machine_owns_the_vf_that_it_has_open(kernel: Kernel, of_vfio: str, bound: str, node: str) -> None:
    """Or a process, as of DPDK."""
    folder = f"/sys/bus/pci/devices/{of_vfio}"
    kernel.set_driver(of_vfio, bound)
    kernel.tree.folder(f"{folder}/uio/uio0" if "uio" in bound else f"{folder}/vfio-dev/vfio3")
    assert owning(kernel) == {}
    kernel.host.open[f"/dev/{node.format(group=kernel.files.target(f'{folder}/iommu_group'))}"] = (
        VIRTUAL_MACHINE.name,
    )
    assert users_of(kernel) == owning(kernel) == {f"{PF}#1": (VIRTUAL_MACHINE,)}


def test_a_vfio_device_that_is_open_without_a_descriptor_is_in_use(kernel: Kernel, of_vfio: str) -> None:
    """As long as a virtual machine's memory is kept after its end. A descriptor tells whose it is."""
    folder = f"/sys/bus/pci/devices/{of_vfio}"
    kernel.tree.put(f"{folder}/enable", "1")
    assert users_of(kernel) == {f"{PF}#1": (User("whoever has its VFIO device open"),)}
    kernel.host.open[f"/dev/vfio/{kernel.files.target(f'{folder}/iommu_group')}"] = (VIRTUAL_MACHINE.name,)
    assert users_of(kernel) == {f"{PF}#1": (VIRTUAL_MACHINE,)}


@pytest.mark.parametrize(("bound", "found"), [("pciback", (User("Xen's pciback", owns=True),)), ("pci-stub", ())])
def test_a_vf_of_xen_s_pciback_has_an_owner_and_one_of_pci_stub_has_none(
    kernel: Kernel, of_vfio: str, bound: str, found: tuple[User, ...]
) -> None:
    """Only Xen knows whether a virtual machine has it."""
    kernel.set_driver(of_vfio, bound)
    assert users_of(kernel).get(f"{PF}#1", ()) == owning(kernel).get(f"{PF}#1", ()) == found


def test_the_netdev_of_virtio_has_users(kernel: Kernel) -> None:
    folder = f"/sys/bus/pci/devices/{PF}"
    kernel.routed.add("enp33s0")
    before = users_of(kernel)
    assert before[PF] == (User("a route through enp33s0"),)
    kernel.tree.remove(f"{folder}/net")
    kernel.set_driver(PF, "virtio-pci")
    kernel.tree.folder(f"{folder}/virtio3/net/enp33s0")
    kernel.tree.link(f"{folder}/virtio3/driver", "../../../bus/virtio/drivers/virtio_net")
    assert users_of(kernel) == before


def test_a_group_that_is_open_is_no_user_of_a_vf_with_a_network_driver(kernel: Kernel, of_vfio: str) -> None:
    other = vf_addresses(kernel.files, PF)[2]
    kernel.host.open[f"/dev/vfio/{kernel.files.target(f'/sys/bus/pci/devices/{other}/iommu_group')}"] = (
        VIRTUAL_MACHINE.name,
    )
    assert users_of(kernel) == {}


OTHER = "0000:41:00.0"


@pytest.fixture
def routed(kernel: Kernel) -> Kernel:
    """The PF is up and has 10.20.0.5; another NIC, which is not looked at, has 10.30.0.5."""
    kernel.add_nic(OTHER, "enp65s0", "02:00:00:00:02:00")
    for pf, *addresses in ((PF, "10.20.0.5/24", "fe80::5/64"), (OTHER, "10.30.0.5/24")):
        index = kernel.netdev(pf).ifindex
        kernel.netlink.set_link(index, up=True)
        for address in addresses:
            kernel.netlink.add_address(index, address)
    return kernel


def of_pf(kernel: Kernel) -> list[tuple[str, str]]:
    """Each user of the PF, and the peer with which it is connected."""
    return [(who, peer) for who, _, peer in (user.name.partition(CONNECTED) for user in users_of(kernel).get(PF, ()))]


CONNECTED = ", connected with "


@pytest.mark.parametrize(
    ("local", "peer", "state"),
    [
        ("10.30.0.5:22", "10.30.0.9:51234", "ESTABLISHED"),
        ("10.20.0.5:22", "0.0.0.0:0", "LISTEN"),
        ("10.20.0.5:40000", "10.20.0.9:443", "TIME_WAIT"),
        ("10.20.0.5:40000", "10.20.0.5:443", "ESTABLISHED"),
        ("10.20.0.5:40000", "10.30.0.5:443", "ESTABLISHED"),
        ("127.0.0.1:40000", "127.0.0.53:53", "ESTABLISHED"),
        ("::1:40000", "::1:443", "ESTABLISHED"),
    ],
)
def test_a_socket_without_a_connection_over_the_nic_is_no_user(
    routed: Kernel, local: str, peer: str, state: str
) -> None:
    routed.connect(local, peer, "sshd (pid 812)", state=state)
    assert users_of(routed) == {}


@pytest.mark.parametrize(
    ("below", "uses"),
    [("", False), ("cali1f/lower_vlan7 vlan7/", False), ("cali1f/lower_vlan7 vlan7/lower_enp65s0", True)],
)
def test_a_connection_with_a_pod_of_this_node_uses_no_nic(routed: Kernel, below: str, uses: bool) -> None:
    """Its end here has the NIC's address, but it is sent by a netdev with no hardware below it."""
    for number, name in enumerate(("cali1f", "vlan7")):
        routed.netdevs[name] = Netdev("", Link(70 + number, name, "ee:ee:ee:ee:ee:ee", "", 1500, True, True))
        for folder in ("/sys/class/net", "/sys/devices/virtual/net"):
            routed.tree.put(f"{folder}/{name}/ifindex", str(70 + number))
    for path in below.split():
        routed.tree.folder(f"/sys/class/net/{path}")
    routed.servers["10.244.0.7"] = "cali1f"
    routed.connect("10.20.0.5:40000", "10.244.0.7:8080", "kubelet (pid 7)")
    assert of_pf(routed) == ([("kubelet (pid 7)", "10.244.0.7:8080")] if uses else [])
    routed.connect("10.20.0.5:40001", "10.20.0.10:6443", "kube-proxy (pid 8)")
    assert ("kube-proxy (pid 8)", "10.20.0.10:6443") in of_pf(routed)


def test_a_connection_uses_the_nic_that_sends_it_whatever_its_address_is(routed: Kernel) -> None:
    """The address is on the loopback, as on a node with several uplinks."""
    routed.netdevs["lo"] = Netdev("", Link(1, "lo", "", "", 65536, True, True))
    routed.ip["lo"] = ("192.0.2.5/32",)
    routed.connect("192.0.2.5:40000", "10.20.0.10:6443", "kubelet (pid 7)")
    assert of_pf(routed) == [("kubelet (pid 7)", "10.20.0.10:6443")]


@pytest.mark.parametrize(
    ("service", "line", "users"),
    [
        pytest.param("10.96.0.1", "0A600001 9C40 0A600001 01BB 0A14000A 192B", True, id="elsewhere"),
        pytest.param("10.96.0.1", "0A600001 9C40 0A600001 01BB 0A140005 192B", False, id="on this node"),
        pytest.param("10.96.0.1", "0A600001 9C41 0A600001 01BB 0A14000A 192B", False, id="of another connection"),
        pytest.param("10.96.0.1", "nonsense 9C40 0A600001 01BB 0A14000A 192B", False, id="nonsense"),
        pytest.param("169.254.20.10", "", False, id="a cache on a dummy of this node"),
        pytest.param("fd00:96::1", "{0} 9C40 {0} 01BB fd20:0000:0000:0000:0000:0000:0000:000a 192B", True, id="IPv6"),
    ],
)
def test_a_connection_to_a_service_of_ipvs_uses_the_nic_to_its_server(
    routed: Kernel, service: str, line: str, users: bool
) -> None:
    """kube-proxy gives the service's address to a dummy netdev here, and the kernel takes it as the address of both ends."""
    routed.netdevs["kube-ipvs0"] = Netdev("", Link(80, "kube-ipvs0", "", "", 1500, False, False))
    routed.ip["kube-ipvs0"] = (f"{service}/128" if ":" in service else f"{service}/32",)
    routed.servers["fd20::a"] = "enp33s0"
    shown = "Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData\nTCP " + line.format(
        "fd00:0096:0000:0000:0000:0000:0000:0001"
    )
    routed.tree.put("/proc/net/ip_vs_conn", shown + " ESTABLISHED     899")
    routed.connect(f"{service}:40000", f"{service}:443", "kubelet (pid 7)")
    peer = f"[{service}]" if ":" in service else service
    assert of_pf(routed) == ([("kubelet (pid 7)", f"{peer}:443")] if users else [])


@pytest.mark.parametrize("vrf", [False, True])
def test_a_connection_uses_the_nic_that_has_its_address(routed: Kernel, vrf: bool) -> None:
    """Also if another one sends it: both are on one network, and the peer's packets come in by this one."""
    if vrf:
        routed.enslave(PF, "vrf0", "vrf")
    else:
        routed.servers["10.20.0.10"] = "enp65s0"
    routed.connect("10.20.0.5:22", "10.20.0.10:51234", "sshd (pid 812)", bound=90 if vrf else 0)
    assert of_pf(routed) == [("sshd (pid 812)", "10.20.0.10:51234")]


def test_a_connection_of_a_vf_that_its_pf_sends_uses_both(routed: Kernel) -> None:
    vf = routed.netdev(vf_addresses(routed.files, PF)[1])
    routed.netlink.add_address(vf.ifindex, "10.20.0.6/24")
    routed.connect("10.20.0.6:22", "10.20.0.10:51234", "sshd (pid 812)")
    user = User(f"sshd (pid 812){CONNECTED}10.20.0.10:51234")
    assert users_of(routed) == {PF: (user,), f"{PF}#1": (user,)}


def test_a_connection_from_an_address_with_a_rule_uses_the_nic_of_the_rule_s_table(routed: Kernel) -> None:
    routed.netlink.add_address(routed.netdev(OTHER).ifindex, "10.20.0.6/24")
    routed.netlink.add_rule(Rule("10.20.0.6", 100, 1000))
    routed.netlink.add_route(Route("10.20.0.0/24", 100, routed.netdev(OTHER).ifindex))
    routed.connect("10.20.0.5:40000", "10.20.0.10:6443", "sshd (pid 812)")
    routed.connect("10.20.0.6:40000", "10.20.0.10:6443", "kubelet (pid 7)")
    assert of_pf(routed) == [("sshd (pid 812)", "10.20.0.10:6443")]


@pytest.mark.parametrize(("bound", "uses"), [("enp33s0", True), ("enp65s0", False)])
def test_a_connection_that_is_bound_to_a_netdev_uses_that_one(routed: Kernel, bound: str, uses: bool) -> None:
    index = routed.netdevs[bound].link.ifindex
    routed.connect("fe80::7:40000", "fe80::9:4420", bound=index)
    routed.connect("10.30.0.5:40000", "10.20.0.9:4420", bound=index)
    assert of_pf(routed) == ([("a connection with 10.20.0.9:4420 and others", "")] if uses else [])


def test_the_users_of_many_connections_are_named_once_each(routed: Kernel) -> None:
    for number in range(2, 200):
        routed.connect("10.20.0.5:443", f"10.20.0.{number}:51234", "nginx (pid 9)")
    routed.connect("10.20.0.5:700", "10.20.0.9:2049")
    routed.connect("10.20.0.5:2049", "10.20.0.8:900")
    assert of_pf(routed) == [
        ("a connection with 10.20.0.8:900 and others", ""),
        ("nginx (pid 9)", "10.20.0.100:51234 and others"),
    ]


@pytest.mark.parametrize(
    ("pair", "user"),
    [
        (QueuePair("nvme_rdma", "RC", "10.0.0.9"), "the kernel (nvme_rdma), connected with 10.0.0.9"),
        (QueuePair("rpcrdma", "RC", "fd00::9"), "the kernel (rpcrdma), connected with fd00::9"),
        (QueuePair("ib_srp", "RC"), "the kernel (ib_srp), connected"),
        (QueuePair("ib_ipoib", "UD"), None),
        (QueuePair("ib_ipoib", "RC"), None),
        (QueuePair("mlx5_ib", "UD"), None),
    ],
)
def test_a_connection_of_the_kernel_over_an_rdma_device_is_a_user(
    kernel: Kernel, pair: QueuePair, user: str | None
) -> None:
    kernel.rdma.add(vf_addresses(kernel.files, PF)[1], "rocep33s0v1", None)
    assert users_of(kernel) == {}
    kernel.rdma.pairs["rocep33s0v1"] = (pair, pair)
    assert users_of(kernel) == ({f"{PF}#1": (User(user),)} if user else {})


@pytest.mark.parametrize(
    ("below", "uses"), [("session1", True), ("rport-4:0-1", True), ("target4:0:0", True), ("", False)]
)
def test_a_scsi_host_of_the_card_uses_the_function_while_it_has_targets(kernel: Kernel, below: str, uses: bool) -> None:
    vf = vf_addresses(kernel.files, PF)[1]
    kernel.tree.folder(f"/sys/bus/pci/devices/{vf}/host4/scsi_host")
    kernel.tree.folder(f"/sys/bus/pci/devices/{vf}/host4/{below}")
    assert users_of(kernel) == ({f"{PF}#1": (User("targets of SCSI host4"),)} if uses else {})


def put_vdpa(kernel: Kernel, below: str, name: str) -> None:
    """A vDPA device that is bound to vhost_vdpa, beside another that is not."""
    for device in (name, "another"):
        kernel.tree.folder(f"/sys/bus/vdpa/devices/{device}")
    kernel.tree.folder(f"/sys/bus/pci/devices/{below}/{name}/vhost-vdpa-3")


def test_a_virtual_machine_owns_the_vf_whose_vdpa_device_it_has_open(kernel: Kernel) -> None:
    put_vdpa(kernel, vf_addresses(kernel.files, PF)[1], "guest-7")
    assert users_of(kernel) == {}
    kernel.host.open["/dev/vhost-vdpa-3"] = (VIRTUAL_MACHINE.name,)
    assert users_of(kernel) == owning(kernel) == {f"{PF}#1": (VIRTUAL_MACHINE,)}


def test_a_virtual_machine_with_vdpa_of_a_subfunction_uses_the_function(kernel: Kernel) -> None:
    kernel.tree.folder("/sys/bus/auxiliary/devices/mlx5_core.sf.4")
    put_vdpa(kernel, f"{PF}/mlx5_core.sf.4", "vdpa0")
    kernel.host.open["/dev/vhost-vdpa-3"] = (VIRTUAL_MACHINE.name,)
    assert users_of(kernel) == {PF: (evolve(VIRTUAL_MACHINE, owns=False),)}


def test_a_process_with_the_rdma_device_of_a_subfunction_uses_the_function(kernel: Kernel) -> None:
    """Such a device is called rocep33s0f0S88 (rdma-core 1741)."""
    kernel.tree.folder("/sys/bus/auxiliary/devices/mlx5_core.sf.4")
    kernel.rdma.add(None, "rocep33s0f0S88", None)
    kernel.tree.folder(f"/sys/bus/pci/devices/{PF}/mlx5_core.sf.4/infiniband/rocep33s0f0S88")
    assert users_of(kernel) == {}
    kernel.host.open["/dev/infiniband/uverbs0"] = ("nccl (pid 77)",)
    assert users_of(kernel) == {PF: (User("nccl (pid 77)"),)}


def test_a_server_without_a_route_is_reached_through_no_nic(kernel: Kernel) -> None:
    kernel.tree.put("/proc/1/mounts", "10.0.0.9:/export /data nfs4 rw 0 0")
    assert users_of(kernel) == {}


def test_a_route_in_the_agent_s_own_tables_is_no_user(kernel: Kernel) -> None:
    index = kernel.netdev(PF).ifindex
    kernel.netlink.set_link(index, up=True)
    kernel.routing.add_address(index, "10.1.0.5/24")
    own = Route("0.0.0.0/0", FIRST_TABLE, index, "10.1.0.1")
    kernel.routing.add_route(own)
    assert users_of(kernel) == {}
    kernel.routing.add_route(evolve(own, table=MAIN))
    assert users_of(kernel) == {PF: (User("a route through enp33s0"),)}


def test_an_efa_function_never_has_a_netdev_and_so_is_in_no_other_namespace(kernel: Kernel) -> None:
    kernel.lose_netdev(PF)
    kernel.set_driver(PF, "efa")
    kernel.rdma.add(PF, "rdmap33s0", None)
    assert users_of(kernel) == owning(kernel) == {}


@pytest.mark.parametrize(("kind", "uses"), [("bond", True), ("team", True), ("bridge", True), ("vrf", False)])
def test_a_netdev_s_master_uses_it_unless_it_is_a_vrf(kernel: Kernel, kind: str, uses: bool) -> None:
    kernel.enslave(PF, "master0", kind)
    assert users_of(kernel) == ({PF: (User("master0 on enp33s0"),)} if uses else {})
    kernel.tree.put("/sys/class/net/enp33s0/upper_vlan7/ifindex", "7")
    assert User("vlan7 on enp33s0") in users_of(kernel)[PF]


def test_a_change_of_a_vf_affects_its_own_users_only(kernel: Kernel) -> None:
    by_target = {PF: (User("a bond"),), f"{PF}#1": (User("a pod"),), f"{PF}#2": (User("another pod"),)}

    def affected(target: str) -> tuple[str, ...]:
        change = Change("vfs", target, "mtu", 1500, 9000, Disruption.REBIND)
        return with_affected(change, wanted(kernel), by_target).affected

    assert affected(f"{PF}#1") == (f"a pod ({PF}#1)",)
    assert affected(f"{PF}#3") == ()
    assert affected(PF) == (f"a bond ({PF})", f"a pod ({PF}#1)", f"another pod ({PF}#2)")
    assert affected("0000:41:00.0#1") == ()


def test_a_pod_s_macvlan_uses_the_netdev_below_it(kernel: Kernel) -> None:
    """The host's sysfs does not show it (tests/unit/linux/test_uppers.py)."""
    kernel.uppers_elsewhere["enp33s0"] = ("net1",)
    assert users_of(kernel) == {PF: (User("net1 on enp33s0, in another network namespace"),)}
    assert owning(kernel) == {}
    kernel.hides_namespaces = True
    assert users_of(kernel) == {}


def test_the_children_of_an_ipoib_netdev_use_it(kernel: Kernel) -> None:
    index = kernel.netdev(PF).ifindex
    for name, kind, iflink in (
        ("enp33s0", "32", index),
        ("ib0.8001", "32", index),
        ("ib1", "32", 77),
        ("ib1.8001", "32", 77),
        # The other end of this pair is in another network namespace, where it has this index.
        ("veth0", "1", index),
    ):
        kernel.tree.put(f"/sys/class/net/{name}/type", kind)
        kernel.tree.put(f"/sys/class/net/{name}/iflink", str(iflink))
    assert users_of(kernel) == {PF: (User("ib0.8001 on enp33s0"),)}


def test_who_has_queues_for_itself_uses_the_netdev(kernel: Kernel) -> None:
    kernel.host.open["socket:[4711]"] = ("xdpsock (pid 77)",)
    kernel.queue_users[PF] = (
        QueueUser(1, "AF_XDP", "socket:[4711]"),
        QueueUser(1, "AF_XDP", "socket:[4712]"),  # of a process that is gone
        QueueUser(2, "io_uring zero copy"),
    )
    named = (
        "xdpsock (pid 77) by AF_XDP on queue 1 of enp33s0",
        "AF_XDP on queue 1 of enp33s0",
        "io_uring zero copy on queue 2 of enp33s0",
    )
    assert users_of(kernel) == {PF: tuple(User(name, of_queue=True) for name in named)}
    assert owning(kernel) == {}
    kernel.netlink.set_link(kernel.netdev(PF).ifindex, up=False)
    assert users_of(kernel) == {}
