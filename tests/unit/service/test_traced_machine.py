"""What the supervisor can see of the worker's calls."""

import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from attrs import evolve

from agent.machine import Link
from agent.service.activity import SIZE, Activity, View
from agent.service.traced_machine import traced
from tests.sim.kernel import Kernel

PF, VF = "0000:21:00.0", "0000:21:10.2"
SYS = "/sys/bus/pci/devices"


class Anything:
    """A part of a machine that accepts any call. Each function has the netdev ens1f0v0 with the index 7, and interrupt 30."""

    def names(self, path: str) -> list[str]:
        return {"net": ["ens1f0v0"], "msi_irqs": ["30"]}.get(path.rpartition("/")[2], [])

    def link(self, name: str) -> Link:
        return Link(7, name, "", "", 1500, True, True)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: (name, arguments, named)


@pytest.fixture
def view() -> View:
    return View.new()


@pytest.fixture
def activity(view: View) -> Activity:
    return Activity.at(view.descriptor)


@pytest.fixture
def machine(activity: Activity) -> Any:
    part: Any = Anything()
    return traced(evolve(Kernel().machine(), files=part, netlink=part, processes=part, ethtool=part), activity)


def test_a_call_is_recorded_before_it_is_made(machine: Any, activity: Activity, view: View) -> None:
    assert view.step() is None
    activity.doing("vfs", "write")
    assert machine.files.write(f"{SYS}/{PF}/sriov_numvfs", "7") == ("write", (f"{SYS}/{PF}/sriov_numvfs", "7"), {})
    step = view.step()
    assert step is not None
    assert (step.kind, step.mode, step.device) == ("vfs", "write", PF)
    assert str(step) == f"vfs: write {SYS}/{PF}/sriov_numvfs 7 (device {PF})"
    activity.idle()
    assert view.step() is None


def test_when_the_latest_call_or_wait_began_is_known(activity: Activity, view: View) -> None:
    assert view.last() == 0.0
    times = [time.monotonic()]
    called = partial(activity.call, PF, "read")
    for record in (called, activity.idle, activity.idle, called):
        record()
        times += [view.last(), time.monotonic()]
    assert times == sorted(set(times))


def device(view: View) -> str:
    """The device of the call that is recorded."""
    step = view.step()
    assert step is not None
    return step.device


def test_a_call_without_an_address_belongs_to_the_device_named_last(machine: Any, view: View) -> None:
    machine.files.names(f"{SYS}/{VF}/net")
    assert device(view) == VF
    machine.files.read("/sys/class/net/ens1f0v0/mtu")
    assert device(view) == VF
    machine.netlink.link("ens1f0v0")
    assert device(view) == VF
    machine.netlink.set_link(7, mtu=9000)
    assert device(view) == VF
    machine.files.read("/sys/kernel/irq/30/actions")
    machine.files.write("/proc/irq/30/smp_affinity_list", "1")
    assert device(view) == VF
    machine.files.write("/sys/bus/pci/drivers_probe", PF)
    assert device(view) == PF


def test_a_netdev_and_an_interrupt_belong_to_the_device_that_listed_them(machine: Any, view: View) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: machine.files.read("/sys/class/net/ens1f0v0/mtu"),
        lambda: machine.netlink.link("ens1f0v0"),
        lambda: machine.ethtool.settings("channels", 7),
        lambda: machine.netlink.set_link(7, mtu=9000),
        lambda: machine.files.write("/proc/irq/30/smp_affinity_list", "1"),
        lambda: machine.files.read("/sys/kernel/irq/30/actions"),
    ]
    for folder in ("net", "msi_irqs"):
        machine.files.names(f"{SYS}/{VF}/{folder}")
    for call in calls:
        for before in (f"{SYS}/{PF}/class", "/run/udev/data/n7"):
            machine.files.read(before)
            call()
            assert device(view) == VF
    # A netdev of no function gives its index to none.
    machine.files.names(SYS)
    machine.files.read(f"{SYS}/{PF}/class")
    machine.netlink.link("veth0")
    machine.files.read(f"{SYS}/{VF}/class")
    machine.ethtool.settings("channels", 7)
    assert device(view) == VF
    # NAPI instances and processes have numbers of their own.
    machine.files.read(f"{SYS}/{PF}/class")
    machine.netlink.set_napi(7, {})
    assert device(view) == PF
    machine.processes.affinity(7)
    assert device(view) == PF


@pytest.mark.parametrize(
    "path", [SYS, "/sys/devices/system/cpu/online", "/proc/sys/net/core/rmem_max", "/run/udev/data"]
)
def test_a_call_to_no_device_blames_none(machine: Any, view: View, path: str) -> None:
    machine.files.read(f"{SYS}/{PF}/class")
    machine.files.names(path)
    assert device(view) == ""
    machine.files.read(f"{SYS}/{PF}/class")
    machine.netlink.addresses()
    assert device(view) == ""


def test_a_text_that_is_too_long_is_cut(machine: Any, view: View) -> None:
    machine.files.write(f"{SYS}/{PF}/resource", "x" * 2 * SIZE)
    assert device(view) == PF


_CALLS = """
import os, sys
from agent.service.activity import Activity
activity = Activity.at(int(sys.argv[1]))
activity.doing("vfs", "write")
activity.idle()
print("started", flush=True)
while True:
    activity.call("0000:21:00.0", "a" * 9)
    os.urandom(4096)  # the call takes a while
    activity.call("0000:21:10.2", "b" * 500)
    os.urandom(4096)
    activity.idle()
"""


def test_whoever_looks_while_calls_are_recorded_sees_one_of_them(view: View) -> None:
    began = time.monotonic()
    seen: set[tuple[str, str, str, str]] = set()
    with subprocess.Popen(
        [sys.executable, "-c", _CALLS, str(view.descriptor)], stdout=subprocess.PIPE, pass_fds=[view.descriptor]
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        # A busy machine may stop the worker in the middle of a record for longer than a view waits.
        while not view.last():
            assert worker.poll() is None and time.monotonic() < began + 60
        expected = {("vfs", "write", PF, "a" * 9), ("vfs", "write", VF, "b" * 500)}
        looks = 0
        try:
            # On a busy machine one look after the other may find the worker where it was stopped.
            while looks < 200 or seen != expected:
                assert time.monotonic() < began + 60
                assert began < view.last() <= time.monotonic()
                if step := view.step():
                    assert began < step.since <= time.monotonic()
                    seen.add((step.kind, step.mode, step.device, step.call))
                    assert seen <= expected
                looks += 1
        finally:
            worker.kill()


def test_a_half_written_record_is_no_call(activity: Activity, view: View) -> None:
    """The parent may look between any two stores of the worker."""
    activity.call(PF, "read")
    memory = mmap.mmap(view.descriptor, SIZE)
    for offset in range(0, 24, 4):
        whole = memory[offset : offset + 4]
        memory[offset : offset + 4] = bytes(4)
        view.step()
        memory[offset : offset + 4] = whole
    memory[16:20] = bytes(4)  # the text of the call before was empty
    assert view.step() is None
