"""NAPI instances: the files of a netdev, and netlink where the kernel has the settings of each."""

import errno

from agent.hardware.functions import ifindex_of, netdev
from agent.machine import Machine
from tests.contract.asking import errno_of

NET = "/sys/class/net"
FILES = {"gro_flush_timeout": "gro_flush_timeout", "defer_hard_irqs": "napi_defer_hard_irqs", "threaded": "threaded"}


def _up(machine: Machine, pf: str) -> int:
    index = ifindex_of(machine.files, pf)
    machine.netlink.set_link(index, up=True)
    return index


def _values(machine: Machine, index: int, setting: str) -> list[int]:
    return [has[setting] for has in machine.netlink.napis(index).values() if setting in has]


def a_file_sets_each_instance_and_those_that_come(machine: Machine, pf: str) -> None:
    index = _up(machine, pf)
    for setting, value in (("gro_flush_timeout", 20000), ("defer_hard_irqs", 2), ("threaded", 1)):
        path = f"{NET}/{netdev(machine.files, pf)}/{FILES[setting]}"
        for napi, has in machine.netlink.napis(index).items():
            if setting in has:
                machine.netlink.set_napi(napi, {setting: 0})
        machine.files.write(path, str(value))
        assert machine.files.read(path) == str(value)
        assert set(_values(machine, index, setting)) <= {value}, setting
        machine.netlink.set_link(index, up=False)
        assert machine.netlink.napis(index) == {}
        machine.netlink.set_link(index, up=True)
        assert set(_values(machine, index, setting)) <= {value}, setting
        machine.files.write(path, "0")
        assert set(_values(machine, index, setting)) <= {0}, setting


def an_instance_is_set_alone_where_the_kernel_has_its_settings(machine: Machine, pf: str) -> None:
    index = _up(machine, pf)
    instances = machine.netlink.napis(index)
    first = min(instances, default=0)
    if "irq_suspend_timeout" not in instances.get(first, {}):
        return
    given = {"irq_suspend_timeout": 2_000_000, "gro_flush_timeout": 5_000_000_000, "defer_hard_irqs": 3}
    before = {setting: instances[first][setting] for setting in given}
    machine.netlink.set_napi(first, given)
    after = machine.netlink.napis(index)
    assert {setting: after[first][setting] for setting in given} == given
    assert {napi: has for napi, has in after.items() if napi != first} == {
        napi: has for napi, has in instances.items() if napi != first
    }
    assert machine.files.read(f"{NET}/{netdev(machine.files, pf)}/gro_flush_timeout") == "0"
    assert errno_of(lambda: machine.netlink.set_napi(first, {"defer_hard_irqs": 2**31})) == errno.ERANGE
    assert errno_of(lambda: machine.netlink.set_napi(2**30, given)) == errno.ENOENT
    machine.netlink.set_napi(first, before)


def a_thread_of_an_instance_runs_where_it_is_told(machine: Machine, pf: str) -> None:
    index = _up(machine, pf)
    path = f"{NET}/{netdev(machine.files, pf)}/threaded"
    machine.files.write(path, "1")
    # Linux 6.8 and later tell the thread.
    for pid in [has["pid"] for has in machine.netlink.napis(index).values() if "pid" in has]:
        everywhere = machine.processes.affinity(pid)
        for cpus in (everywhere[-1:], everywhere):
            machine.processes.set_affinity(pid, cpus)
            assert machine.processes.affinity(pid) == cpus
    machine.files.write(path, "0")
    assert errno_of(lambda: machine.processes.set_affinity(2**22, (0,))) == errno.ESRCH


def a_number_that_a_file_does_not_take_is_refused(machine: Machine, pf: str) -> None:
    index = _up(machine, pf)
    folder = f"{NET}/{netdev(machine.files, pf)}"
    assert errno_of(lambda: machine.files.write(f"{folder}/threaded", "2")) == errno.EOPNOTSUPP
    assert machine.files.read(f"{folder}/threaded") == "0"
    if _values(machine, index, "defer_hard_irqs"):  # older kernels may take each number
        assert errno_of(lambda: machine.files.write(f"{folder}/napi_defer_hard_irqs", str(2**31))) == errno.ERANGE
