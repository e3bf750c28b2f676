"""RDMA devices, the rdma_cm's defaults, the subsystem's mode, and a netdev without Data Center Bridging."""

import errno

from agent.hardware.functions import PCI, device_path, netdev, vf_addresses
from agent.hardware.rdma import RdmaDevice, Reader
from agent.hardware.sysfs import read_or
from agent.hardware.udev import UDEV, initialised
from agent.machine import Machine
from tests.contract.asking import errno_of, soon


def _udev_records(machine: Machine) -> dict[str, str]:
    """What udev's database has of each RDMA device, by its name."""
    names = [each for each in machine.files.names(UDEV) if each.startswith("+infiniband:")]
    return {each.removeprefix("+infiniband:"): read_or(machine.files, f"{UDEV}/{each}", "") for each in names}


def _vf(machine: Machine, pf: str) -> tuple[str, RdmaDevice]:
    """A new VF that is up, and its RDMA device once udev has named it and its port is ACTIVE."""
    name = netdev(machine.files, pf)
    link = machine.netlink.link(name) if name else None
    assert link is not None
    machine.netlink.set_link(link.ifindex, up=True)
    machine.files.write(f"{PCI}/{pf}/sriov_drivers_autoprobe", "1")
    machine.files.write(f"{PCI}/{pf}/sriov_numvfs", "0")
    before = _udev_records(machine)
    machine.files.write(f"{PCI}/{pf}/sriov_numvfs", "1")
    vf = vf_addresses(machine.files, pf)[0]

    def active() -> RdmaDevice | None:
        name = netdev(machine.files, vf)
        link = machine.netlink.link(name) if name else None
        if link is None or not initialised(machine.files, link.ifindex):
            return None
        if not link.up:
            machine.netlink.set_link(link.ifindex, up=True)
        reader = Reader(machine.files)
        # Before rdma-core 49 or Linux 6.5 udev gives each new device a name such as rocep33s0f0v0, and keeps its record of the
        # former name for ever. Since then it leaves a name that a user gave, as `rdma link add` does; its record is then new.
        records = _udev_records(machine)
        final = [n for n in reader.below(vf) if n.startswith("roce") or records.get(n) != before.get(n)]
        made = [reader.device(each, reader.char_devices(device_path(vf)).get(each, ())) for each in final]
        # udev may rename the device between two readings: a name that has gone has no port.
        return next((each for each in made if any(port.state == "ACTIVE" for port in each.ports)), None)

    return vf, soon(active, f"an ACTIVE RDMA device of {vf}", within=30.0)


def a_vf_s_rdma_device_is_below_its_function_and_goes_with_it(machine: Machine, pf: str) -> None:
    vf, device = _vf(machine, pf)
    assert device.transport == "RoCE"
    assert device.ports[0].link_layer == "Ethernet"
    assert device.ports[0].netdev == netdev(machine.files, vf)
    assert device.ports[0].gigabits == 2.5
    assert [each.name.rstrip("0123456789") for each in device.char_devices if each.present] == ["uverbs"]
    assert Reader(machine.files).of(vf) == [device.name]
    detailed = Reader(machine.files).detailed(device)
    # rxe's constants (RXE_PORT_LID and others, drivers/infiniband/sw/rxe/rxe_param.h); it has no file hw_rev.
    assert [(port.lid, port.lmc, port.sm_lid) for port in detailed.ports] == [(0, 0, 0)]
    assert (detailed.sys_image_guid is not None, detailed.hw_rev) == (True, None)
    machine.files.write(f"{PCI}/{vf}/driver/unbind", vf)
    # rxe unregisters its device in a work queue after the netdev has gone (rxe_notify, drivers/infiniband/sw/rxe/rxe_net.c).
    soon(lambda: Reader(machine.files).of(vf) == [] or None, f"end of the RDMA device of {vf}")
    assert device.name not in Reader(machine.files).all()


def a_roce_port_has_the_default_partition_key_and_no_subnet_manager(machine: Machine, pf: str) -> None:
    _, device = _vf(machine, pf)
    assert Reader(machine.files).pkeys(device.name, 1) == (0xFFFF,)
    assert machine.files.read(f"/sys/class/infiniband/{device.name}/ports/1/sm_lid") == "0x0"
    assert device.ports[0].sm_lid is None


def a_gid_has_a_type_and_a_netdev_and_an_empty_entry_is_no_gid(machine: Machine, pf: str) -> None:
    vf, device = _vf(machine, pf)
    gids = tuple(Reader(machine.files).gids(device, 1))
    assert {(gid.type, gid.netdev, gid.family) for gid in gids} == {("RoCE v2", netdev(machine.files, vf), "IPv6")}
    assert device.ports[0].gids == ()
    assert min(gid.index for gid in gids) == 0


def the_kernel_itself_has_a_queue_pair_for_management_datagrams_and_is_connected_with_nobody(
    machine: Machine, pf: str
) -> None:
    _, device = _vf(machine, pf)
    assert {(pair.module, pair.type, pair.peer) for pair in machine.rdma.queue_pairs(device.name)} == {
        ("ib_core", "GSI", "")
    }
    assert machine.rdma.queue_pairs("nosuch0") == ()


def the_rdma_cm_s_defaults_are_written_and_read(machine: Machine, pf: str) -> None:
    _, device = _vf(machine, pf)
    defaults = machine.rdma.cm_defaults(device.name, 1)
    assert defaults is not None
    assert (defaults.tos, defaults.mode) == (0, "RoCE v2")
    machine.rdma.set_cm_defaults(device.name, 1, tos=106, mode="RoCE v2")
    defaults = machine.rdma.cm_defaults(device.name, 1)
    assert defaults is not None
    assert (defaults.tos, defaults.mode) == (106, "RoCE v2")
    assert errno_of(lambda: machine.rdma.set_cm_defaults(device.name, 1, tos=256)) == errno.ERANGE
    assert errno_of(lambda: machine.rdma.set_cm_defaults(device.name, 1, mode="RoCE v1")) == errno.EINVAL


def the_rdma_cm_has_no_defaults_of_a_device_that_is_gone(machine: Machine, pf: str) -> None:
    assert machine.rdma.cm_defaults("nosuch0", 1) is None
    assert errno_of(lambda: machine.rdma.set_cm_defaults("nosuch0", 1, tos=0)) == errno.ENODEV


def the_netns_mode_is_changed_and_changed_back(machine: Machine, pf: str) -> None:
    """On a node whose only network namespace is the host's."""
    _vf(machine, pf)
    assert machine.rdma.netns_mode() == "shared"
    machine.rdma.set_netns_mode("exclusive")
    assert machine.rdma.netns_mode() == "exclusive"
    machine.rdma.set_netns_mode("shared")
    assert machine.rdma.netns_mode() == "shared"


def a_driver_without_dcb_reports_no_state_and_refuses_writes(machine: Machine, pf: str) -> None:
    name = netdev(machine.files, pf)
    assert name is not None
    assert machine.dcb.state(name) is None
    assert errno_of(lambda: machine.dcb.set_pfc(name, frozenset({3}))) == errno.EOPNOTSUPP
    assert errno_of(lambda: machine.dcb.add_dscp(name, frozenset({(26, 3)}))) == errno.EOPNOTSUPP
    assert errno_of(lambda: machine.dcb.remove_dscp(name, frozenset({(26, 3)}))) == errno.EOPNOTSUPP
    assert machine.dcb.state("nosuch0") is None
    assert errno_of(lambda: machine.dcb.add_dscp("nosuch0", frozenset({(26, 3)}))) == errno.ENODEV
