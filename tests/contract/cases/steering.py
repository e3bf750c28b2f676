"""Queues: the masks of RPS and XPS, and the tables of RFS."""

import errno

from agent.hardware.functions import netdev
from agent.hardware.placement import from_mask
from agent.machine import Machine
from tests.contract.asking import errno_of
from tests.contract.cases.sriov import _fresh, _link, _one_vf


def _queues(machine: Machine, pf: str) -> str:
    return f"/sys/class/net/{netdev(machine.files, pf)}/queues"


def a_netdev_names_its_function(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    assert machine.files.target(f"/sys/class/net/{netdev(machine.files, pf)}/device") == pf


def a_netdev_that_is_not_there_has_no_queue_to_write(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    path = "/sys/class/net/cali-gone/queues/rx-0/rps_cpus"
    assert errno_of(lambda: machine.files.write(path, "00000001")) == errno.ENOENT


def a_flow_table_s_size_is_rounded_up_to_a_power_of_two(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    path = f"{_queues(machine, pf)}/rx-0/rps_flow_cnt"
    for written, read in (("5", "8"), ("8", "8"), ("1", "1"), ("0", "0")):
        machine.files.write(path, written)
        assert machine.files.read(path) == read, written


def a_single_transmit_queue_has_no_mask(machine: Machine, pf: str) -> None:
    vf = _one_vf(machine, pf)
    _link(machine, vf)
    folder = _queues(machine, vf)
    assert [name for name in machine.files.names(folder) if name.startswith("tx-")] == ["tx-0"]
    assert errno_of(lambda: machine.files.read(f"{folder}/tx-0/xps_cpus")) == errno.ENOENT
    assert errno_of(lambda: machine.files.write(f"{folder}/tx-0/xps_cpus", "00000001")) == errno.ENOENT


def each_of_several_transmit_queues_has_a_mask(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    path = f"{_queues(machine, pf)}/tx-1/xps_cpus"
    machine.files.write(path, "00000003")
    assert from_mask(machine.files.read(path)) == {0, 1}
    machine.files.write(path, "00000000")
    assert from_mask(machine.files.read(path)) == frozenset()


def a_cpu_beyond_the_machine_s_is_refused_in_a_mask(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    beyond = "00000001," + "00000000," * 255 + "00000000"
    assert errno_of(lambda: machine.files.write(f"{_queues(machine, pf)}/rx-0/rps_cpus", beyond)) == errno.EOVERFLOW


def no_other_namespace_has_a_function_of_this_one(machine: Machine, pf: str) -> None:
    _fresh(machine, pf)
    assert netdev(machine.files, pf) is not None
    assert machine.namespaces.holding([pf]) == {}
