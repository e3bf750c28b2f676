"""SR-IOV: VFs, their attributes, drivers, netdevs and interrupts."""

import errno

from agent.hardware import udev
from agent.hardware.functions import PCI, driver, ifindex, netdev, targets, vf_addresses
from agent.hardware.interrupts import function_irqs
from agent.machine import Link, Machine
from agent.state.wanted import derived_mac
from tests.contract.asking import errno_of, soon


def _link(machine: Machine, function: str) -> Link:
    """The function's netdev after udev has renamed it and given it an address."""

    def initialised() -> Link | None:
        name = netdev(machine.files, function)
        index = ifindex(machine.files, name) if name else 0
        return machine.netlink.link(name) if name and index and udev.initialised(machine.files, index) else None

    return soon(initialised, f"a netdev of {function}")


def _numvfs(machine: Machine, pf: str, count: int) -> None:
    machine.files.write(f"{PCI}/{pf}/sriov_numvfs", str(count))


def _autoprobe(machine: Machine, pf: str, on: bool) -> None:
    machine.files.write(f"{PCI}/{pf}/sriov_drivers_autoprobe", str(int(on)))


def _probe(machine: Machine, function: str) -> None:
    machine.files.write("/sys/bus/pci/drivers_probe", function)


def _fresh(machine: Machine, pf: str) -> int:
    """Remove all VFs and bring the PF up: while the PF is down, a VF's driver gets no address from it.

    :returns: the index of the PF's netdev.
    """
    index = _link(machine, pf).ifindex
    machine.netlink.set_link(index, up=True)
    _autoprobe(machine, pf, True)
    _numvfs(machine, pf, 0)
    return index


def _one_vf(machine: Machine, pf: str, bound: bool = True) -> str:
    """A VF of a fresh PF, with a driver if it is to be bound."""
    _fresh(machine, pf)
    _autoprobe(machine, pf, bound)
    _numvfs(machine, pf, 1)
    return vf_addresses(machine.files, pf)[0]


def _grant_derived(machine: Machine, pf: str) -> str:
    """Have the PF grant its first VF another address; that address."""
    own = _link(machine, pf)
    mac = derived_mac(own.permanent_mac, 0)
    machine.netlink.set_vf(own.ifindex, 0, mac=mac)
    return mac


def vfs_appear_with_addresses_and_go_again(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    _numvfs(machine, pf, 3)
    assert machine.files.read(f"{PCI}/{pf}/sriov_numvfs") == "3"
    assert sorted(vf_addresses(machine.files, pf)) == [0, 1, 2]
    for vf in vf_addresses(machine.files, pf).values():
        assert machine.files.target(f"{PCI}/{vf}/physfn") == pf
    assert list(targets(machine.files, pf)) == [pf, f"{pf}#0", f"{pf}#1", f"{pf}#2"]
    _numvfs(machine, pf, 0)
    assert vf_addresses(machine.files, pf) == {}


def a_number_of_vfs_is_replaced_only_by_way_of_0(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    _numvfs(machine, pf, 2)
    assert errno_of(lambda: _numvfs(machine, pf, 3)) == errno.EBUSY
    assert machine.files.read(f"{PCI}/{pf}/sriov_numvfs") == "2"


def more_vfs_than_there_are_is_erange(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    assert machine.files.read(f"{PCI}/{pf}/sriov_totalvfs") == "7"
    assert errno_of(lambda: _numvfs(machine, pf, 8)) == errno.ERANGE


def without_autoprobe_a_vf_stays_unbound_even_if_asked(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf, bound=False)
    assert driver(machine.files, vf) is None
    _probe(machine, vf)
    assert driver(machine.files, vf) is None
    _autoprobe(machine, pf, True)
    assert driver(machine.files, vf) is None
    _probe(machine, vf)
    assert driver(machine.files, vf) == "igbvf"


def a_vf_has_the_address_that_was_set_before_its_driver_was_bound(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf, bound=False)
    mac = _grant_derived(machine, pf)
    _autoprobe(machine, pf, True)
    _probe(machine, vf)
    assert _link(machine, vf).mac == mac


def an_address_that_is_set_for_a_bound_vf_counts_once_it_is_bound_again(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf)
    before = _link(machine, vf).mac
    mac = _grant_derived(machine, pf)
    assert _link(machine, vf).mac == before != mac
    machine.files.write(f"{PCI}/{vf}/driver/unbind", vf)
    assert driver(machine.files, vf) is None
    assert netdev(machine.files, vf) is None
    _probe(machine, vf)
    assert _link(machine, vf).mac == mac


def a_trusted_vf_whose_driver_is_unbound_sets_its_old_address_again(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf)
    before = _link(machine, vf)
    machine.netlink.set_vf(_link(machine, pf).ifindex, 0, trust=True)
    machine.netlink.set_link(before.ifindex, up=True)
    mac = _grant_derived(machine, pf)
    assert _link(machine, pf).vfs[0].mac == mac
    machine.files.write(f"{PCI}/{vf}/driver/unbind", vf)
    assert _link(machine, pf).vfs[0].mac == before.mac


def the_pf_reports_what_it_granted(machine: Machine, pf: str) -> None:
    index = _fresh(machine, pf)
    _numvfs(machine, pf, 2)
    machine.netlink.set_vf(index, 1, vlan=100)
    machine.netlink.set_vf(index, 1, trust=True)
    machine.netlink.set_vf(index, 1, spoofchk=False)
    first, second = _link(machine, pf).vfs
    assert (first.vlan, first.trust, first.spoofchk) == (0, False, True)
    assert (second.vlan, second.trust, second.spoofchk) == (100, True, False)
    assert errno_of(lambda: machine.netlink.set_vf(index, 5, vlan=1)) == errno.EINVAL


def a_reset_of_the_count_forgets_what_was_granted(machine: Machine, pf: str) -> None:
    _one_vf(machine, pf)
    machine.netlink.set_vf(_link(machine, pf).ifindex, 0, vlan=100)
    _numvfs(machine, pf, 0)
    _numvfs(machine, pf, 1)
    assert _link(machine, pf).vfs[0].vlan == 0


def interrupts_come_when_the_link_goes_up_and_go_with_it(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf)
    machine.netlink.set_link(_link(machine, vf).ifindex, up=True)
    assert [irq.name for irq in function_irqs(machine, vf)] == ["tx-0", "rx-0", "management-0"]
    assert "txrx-0" in [irq.name for irq in function_irqs(machine, pf)]
    machine.netlink.set_link(_link(machine, vf).ifindex, up=False)
    assert function_irqs(machine, vf) == ()


def a_vf_whose_pf_is_down_gets_another_address(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf, bound=False)
    mac = _grant_derived(machine, pf)
    machine.netlink.set_link(_link(machine, pf).ifindex, up=False)
    _autoprobe(machine, pf, True)
    _probe(machine, vf)
    assert _link(machine, vf).mac != mac


def an_interrupt_s_affinity_is_written_and_read(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    irq = next(irq for irq in function_irqs(machine, pf) if irq.role != "management")
    path = f"/proc/irq/{irq.number}/smp_affinity_list"
    machine.files.write(path, "1")
    assert machine.files.read(path) == "1"
    assert errno_of(lambda: machine.files.write(path, "900")) in (errno.EINVAL, errno.ERANGE, errno.EOVERFLOW)
    assert machine.files.read(path) == "1"


def the_kernel_knows_the_queues_that_the_names_of_interrupts_say(machine: Machine, pf: str) -> None:
    """It knows none before Linux 6.16, where igb began to tell it (igb_set_queue_napi in igb_main.c)."""
    _fresh(machine, pf)
    for number, queues in machine.netlink.queue_irqs(_link(machine, pf).ifindex).items():
        role, queue = machine.files.read(f"/sys/kernel/irq/{number}/actions").rsplit("-", 2)[1:]
        said = {"TxRx": (int(queue), int(queue)), "rx": (int(queue), None), "tx": (None, int(queue))}
        assert (queues.rx, queues.tx) == said[role]
    assert errno_of(lambda: machine.netlink.queue_irqs(1 << 20)) in (None, errno.ENODEV)


def a_mask_is_hexadecimal_without_a_prefix(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    path = f"/sys/class/net/{_link(machine, pf).name}/queues/rx-0/rps_cpus"
    assert errno_of(lambda: machine.files.write(path, "0x3")) == errno.EINVAL
    machine.files.write(path, "00000003")
    assert int(machine.files.read(path).replace(",", ""), 16) == 3
    machine.files.write(path, "00000000")


def a_vf_has_no_carrier_while_its_pf_is_down(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf)
    machine.netlink.set_link(_link(machine, vf).ifindex, up=True)
    soon(lambda: _link(machine, vf).carrier or None, "carrier of the VF")
    machine.netlink.set_link(_link(machine, pf).ifindex, up=False)
    soon(lambda: not _link(machine, vf).carrier or None, "loss of the VF's carrier")


def a_loss_of_carrier_is_counted(machine: Machine, pf: str) -> None:
    """Also when the netdev is set down."""
    _fresh(machine, pf)
    index = soon(lambda: _link(machine, pf).ifindex if _link(machine, pf).carrier else None, "carrier of the PF")
    before = _link(machine, pf).carrier_downs
    machine.netlink.set_link(index, up=False)
    soon(lambda: _link(machine, pf).carrier_downs == before + 1 or None, "a count of the loss")
    machine.netlink.set_link(index, up=True)


def an_mtu_beyond_the_device_is_refused(machine: Machine, pf: str) -> None:
    index, most = _fresh(machine, pf), _link(machine, pf).max_mtu
    machine.netlink.set_link(index, mtu=most)
    assert _link(machine, pf).mtu == most
    assert errno_of(lambda: machine.netlink.set_link(index, mtu=most + 1)) == errno.EINVAL
    machine.netlink.set_link(index, mtu=1500)


def a_link_or_function_that_does_not_exist_is_an_error(machine: Machine, pf: str) -> None:
    assert machine.netlink.link("nosuch0") is None
    assert errno_of(lambda: machine.netlink.set_link(99999, up=True)) == errno.ENODEV
    assert errno_of(lambda: machine.files.write(f"{PCI}/0000:ff:1f.7/sriov_numvfs", "1")) == errno.ENOENT
    assert errno_of(lambda: machine.files.write("/sys/bus/pci/drivers_probe", "0000:ff:1f.7")) == errno.ENODEV
