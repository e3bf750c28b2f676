"""What belongs to no device, and PCI configuration space."""

import errno

from agent.hardware.config_space import device_control, max_read_request, with_max_read_request
from agent.hardware.functions import PCI
from agent.kinds.host import hugepages
from agent.machine import Machine
from agent.spec import sysctl_names
from agent.spec.node import HugepagePool
from tests.contract.asking import errno_of

NETNS_MODE = "/sys/module/ib_core/parameters/netns_mode"


def _errno(machine: Machine, path: str, text: str) -> int | None:
    return errno_of(lambda: machine.files.write(path, text))


def words_of_a_sysctl_are_read_back_with_tabs_between(machine: Machine, pf: str) -> None:
    path = sysctl_names.path("net.ipv4.ip_local_port_range")
    before = machine.files.read(path)
    machine.files.write(path, "20000 60000")
    assert machine.files.read(path) == "20000\t60000"
    machine.files.write(path, before)
    assert machine.files.read(path) == before


def a_sysctl_that_is_not_there_is_enoent(machine: Machine, pf: str) -> None:
    assert _errno(machine, sysctl_names.path("net.ipv4.no_such_thing"), "1") == errno.ENOENT


def a_parameter_without_a_write_bit_is_refused_even_to_root(machine: Machine, pf: str) -> None:
    assert machine.files.read(NETNS_MODE) in ("Y", "N")
    assert not machine.files.writable(NETNS_MODE)
    assert _errno(machine, NETNS_MODE, machine.files.read(NETNS_MODE)) == errno.EACCES


def huge_pages_of_a_node_are_no_other_node_s(machine: Machine, pf: str) -> None:
    def pool(node: int | None) -> hugepages.Pool:
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


def the_kernel_gives_fewer_huge_pages_than_it_has_no_memory_for_and_says_nothing(machine: Machine, pf: str) -> None:
    wanted = HugepagePool("2M", 1 << 20, 1)
    before = hugepages.read(machine.files, wanted)
    machine.files.write(f"{hugepages.path(wanted)}/nr_hugepages", str(wanted.count))
    assert before.persistent <= hugepages.read(machine.files, wanted).persistent < wanted.count
    machine.files.write(f"{hugepages.path(wanted)}/nr_hugepages", str(before.persistent))
    assert hugepages.read(machine.files, wanted) == before


def a_function_s_device_control_is_found_and_written(machine: Machine, pf: str) -> None:
    config = f"{PCI}/{pf}/config"
    assert len(machine.files.read_at(config, 0, 256)) == 256
    found = device_control(machine.files, pf)
    assert found is not None
    at, control = found
    assert max_read_request(control) in (128, 256, 512, 1024, 2048, 4096)
    machine.files.write_at(config, at, with_max_read_request(control, max_read_request(control)).to_bytes(2, "little"))
    assert device_control(machine.files, pf) == found
