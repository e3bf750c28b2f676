"""State that belongs to no device, and PCI configuration space."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from agent.hardware.config_space import device_control, max_read_request, with_max_read_request
from agent.hardware.functions import PCI
from agent.hardware.interrupts import function_irqs
from agent.hardware.load import Load, read_load
from agent.hardware.topology import read_topology
from agent.kinds.host import hugepages
from agent.machine import Machine
from agent.spec import sysctl_names
from agent.spec.node import HugepagePool
from tests.contract.asking import errno_of

NETNS_MODE = "/sys/module/ib_core/parameters/netns_mode"


def _errno(machine: Machine, path: str, text: str) -> int | None:
    return errno_of(lambda: machine.files.write(path, text))


@contextmanager
def _put_back(machine: Machine, name: str) -> Iterator[str]:
    """The path of a sysctl, whose value is written back at the end, and reads as before then."""
    path = sysctl_names.path(name)
    before = machine.files.read(path)
    yield path
    machine.files.write(path, before)
    assert machine.files.read(path) == before


def words_of_a_sysctl_are_read_back_with_tabs_between(machine: Machine, pf: str) -> None:
    with _put_back(machine, "net.ipv4.ip_local_port_range") as path:
        machine.files.write(path, "20000 60000")
        assert machine.files.read(path) == "20000\t60000"


def numbers_of_a_sysctl_are_read_as_c_reads_them_and_shown_in_decimal(machine: Machine, pf: str) -> None:
    with _put_back(machine, "net.core.somaxconn") as path:
        for text, shown in (("0x1000", "4096"), ("010", "8"), ("4096 7", "4096"), (" 5", "5")):
            machine.files.write(path, text)
            assert machine.files.read(path) == shown
        for text in ("+4096", "08", "4096x", "1e3", "true"):
            assert _errno(machine, path, text) == errno.EINVAL


def the_time_that_each_cpu_spends_on_packets_is_read(machine: Machine, pf: str) -> None:
    first = read_load(machine.files, Load())
    (reading,) = first.readings
    cpus = read_topology(machine).cpus.keys()
    assert reading.at > 0
    assert reading.ticks.keys() == reading.squeezed.keys() == cpus
    assert all(0 <= reading.busy[cpu] <= reading.ticks[cpu] for cpu in cpus)
    assert {irq.number for irq in function_irqs(machine, pf)} <= reading.interrupts.keys()
    assert read_load(machine.files, first) is first


def of_a_sysctl_with_several_numbers_the_first_ones_may_be_written(machine: Machine, pf: str) -> None:
    with _put_back(machine, "net.ipv4.ip_local_port_range") as path:
        for text in ("0x4e20 60000", "20000 60000 7", "20000"):
            machine.files.write(path, text)
            assert machine.files.read(path) == "20000\t60000"


def a_list_of_ports_is_shown_as_rising_ranges(machine: Machine, pf: str) -> None:
    with _put_back(machine, "net.ipv4.ip_local_reserved_ports") as path:
        for text, shown in (("30000-30000", "30000"), ("4-6,1-1,3-4", "1,3-6"), ("30001,30000", "30000-30001")):
            machine.files.write(path, text)
            assert machine.files.read(path) == shown
        for text in ("30000, 30002", "30002-30000", "+30000"):
            assert _errno(machine, path, text) == errno.EINVAL
        machine.files.write(path, "")
        assert machine.files.read(path) == "30000-30001"
        machine.files.write(path, "\n")
        assert machine.files.read(path) == ""


def a_sysctl_that_is_not_there_is_enoent(machine: Machine, pf: str) -> None:
    assert _errno(machine, sysctl_names.path("net.ipv4.no_such_thing"), "1") == errno.ENOENT


def a_parameter_without_a_write_bit_is_refused_even_to_root(machine: Machine, pf: str) -> None:
    assert machine.files.read(NETNS_MODE) in ("Y", "N")
    assert not machine.files.writable(NETNS_MODE)
    assert _errno(machine, NETNS_MODE, machine.files.read(NETNS_MODE)) == errno.EACCES


def huge_pages_belong_to_one_numa_node(machine: Machine, pf: str) -> None:
    def pool(node: int | None) -> hugepages.Pages:
        return hugepages.read(machine.files, HugepagePool("2M", 0, node))

    before = pool(1)
    other = pool(0)
    path = hugepages.path(HugepagePool("2M", 0, 1))
    machine.files.write(f"{path}/nr_hugepages", str(before.total + 2))
    assert pool(1).persistent == before.persistent + 2
    assert pool(0) == other
    assert pool(None).total == pool(0).total + pool(1).total
    machine.files.write(f"{path}/nr_hugepages", str(before.persistent))
    assert pool(1) == before


def the_kernel_sets_a_ratio_to_0_for_an_amount_and_an_amount_for_a_ratio(machine: Machine, pf: str) -> None:
    for ratio, amount, least in (
        ("vm.dirty_ratio", "vm.dirty_bytes", 8192),
        ("vm.dirty_background_ratio", "vm.dirty_background_bytes", 1),
        ("vm.overcommit_ratio", "vm.overcommit_kbytes", 0),
    ):
        _either(machine, sysctl_names.path(ratio), sysctl_names.path(amount), least)


def _either(machine: Machine, ratio: str, amount: str, least: int) -> None:
    def shown() -> tuple[str, str]:
        return machine.files.read(ratio), machine.files.read(amount)

    before = shown()
    try:
        machine.files.write(ratio, "60")
        assert shown() == ("60", "0")
        if least:
            assert _errno(machine, amount, "0") == errno.EINVAL
            assert _errno(machine, amount, str(least - 1)) == errno.EINVAL
        machine.files.write(amount, "4000000000")
        assert shown() == ("0", "4000000000")
        machine.files.write(ratio, "1")
        machine.files.write(ratio, "0")
        assert shown() == ("0", "0")
    finally:
        for path, value in zip((ratio, amount), before, strict=True):
            if value != "0":
                machine.files.write(path, value)
    assert shown() == before


def a_ratio_that_stays_0_leaves_its_amount(machine: Machine, pf: str) -> None:
    ratio, amount = sysctl_names.path("vm.dirty_ratio"), sysctl_names.path("vm.dirty_bytes")
    before = machine.files.read(ratio)
    machine.files.write(amount, "4000000000")
    machine.files.write(ratio, "0")
    assert machine.files.read(amount) == "4000000000"
    machine.files.write(ratio, before)
    assert machine.files.read(amount) == "0"


def without_enough_memory_the_kernel_makes_fewer_huge_pages_and_no_error(machine: Machine, pf: str) -> None:
    wanted = HugepagePool("2M", 1 << 20, 1)
    before = hugepages.read(machine.files, wanted)
    machine.files.write(f"{hugepages.path(wanted)}/nr_hugepages", str(wanted.count))
    assert before.persistent <= hugepages.read(machine.files, wanted).persistent < wanted.count
    machine.files.write(f"{hugepages.path(wanted)}/nr_hugepages", str(before.persistent))
    assert hugepages.read(machine.files, wanted) == before


def a_function_s_device_control_is_found_and_written(machine: Machine, pf: str) -> None:
    config = f"{PCI}/{pf}/config"
    assert len(machine.files.read_at(config, 0, 256)) == 256
    offset = device_control(machine.files, pf)
    assert offset is not None
    at, control = offset
    assert max_read_request(control) in (128, 256, 512, 1024, 2048, 4096)
    machine.files.write_at(config, at, with_max_read_request(control, max_read_request(control)).to_bytes(2, "little"))
    assert device_control(machine.files, pf) == offset
