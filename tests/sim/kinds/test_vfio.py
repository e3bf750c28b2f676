"""VFs that are bound to vfio-pci for virtual machines, on the simulated kernel."""

import errno
from contextlib import suppress

import pytest

from agent.driver_families import VFIO
from agent.engine.dry_run import dry_run
from agent.hardware.functions import PCI, driver
from agent.report.records import Disruption
from agent.report.verdict import is_ready
from tests.sim.kernel import Kernel, no_fault
from tests.sim.killed import Killed
from tests.sim.kinds.test_sriov import MAC, NAME, PF, address, group, made, spec
from tests.sim.passes import settle, undone
from tests.sim.refusing import refusing


@pytest.fixture
def kernel() -> Kernel:
    return made()


def test_a_vf_for_vfio_is_never_bound_to_the_network_driver(kernel: Kernel) -> None:
    result = settle(kernel, spec(group(driver="vfio-pci")))
    assert is_ready(result.conditions), result.conditions
    assert [driver(kernel.files, address(kernel, index)) for index in range(4)] == [
        "igbvf",
        "vfio-pci",
        "igbvf",
        "igbvf",
    ]
    assert not any(path.endswith("unbind") for path, _ in kernel.writes)
    assert not dry_run(kernel.machine(), spec(group(driver="vfio-pci"))).changes


def test_a_bound_vf_goes_to_vfio_and_back(kernel: Kernel) -> None:
    settle(kernel, spec(group()))
    (change,) = [c for c in dry_run(kernel.machine(), spec(group(driver="vfio-pci"))).changes if c.kind == "bindings"]
    assert (change.before, change.after, change.disruption) == ("igbvf", "vfio-pci", Disruption.REBIND)
    assert is_ready(settle(kernel, spec(group(driver="vfio-pci"))).conditions)
    assert driver(kernel.files, address(kernel, 1)) == "vfio-pci"
    # Whoever says nothing of the driver leaves it.
    assert settle(kernel, spec(group())).outcomes == ()
    assert is_ready(settle(kernel, spec(group(driver="netdevice"))).conditions)
    assert driver(kernel.files, address(kernel, 1)) == "igbvf"
    assert kernel.files.read(f"{PCI}/{address(kernel, 1)}/driver_override") == "(null)"
    assert not dry_run(kernel.machine(), spec(group(driver="netdevice"))).changes


def test_a_driver_of_vfio_for_the_vf_s_family_is_as_good_as_vfio_pci(kernel: Kernel) -> None:
    settle(kernel, spec(group(driver="vfio-pci")))
    kernel.set_driver(address(kernel, 1), "mlx5_vfio_pci")
    assert not dry_run(kernel.machine(), spec(group(driver="vfio-pci"))).changes
    (change,) = [c for c in dry_run(kernel.machine(), spec(group(driver="netdevice"))).changes if c.kind == "bindings"]
    assert (change.before, change.after) == ("mlx5_vfio_pci", "netdevice")


MACS = ("02:aa:00:00:00:01", "02:aa:00:00:00:02")


def override(kernel: Kernel, index: int = 1) -> str:
    return kernel.files.read(f"{PCI}/{address(kernel, index)}/driver_override")


@pytest.mark.parametrize("back", [{}, {"driver": "netdevice"}])
@pytest.mark.parametrize("killed", [False, True], ids=["refused", "killed"])
@pytest.mark.parametrize("end", ["/driver_override", "/driver/unbind", "/drivers_probe"])
def test_a_vf_whose_way_to_vfio_ended_half_way_stays_with_the_network_driver_if_the_spec_is_taken_back(
    kernel: Kernel, end: str, killed: bool, back: dict[str, str]
) -> None:
    def stop(operation: str, where: str, value: str) -> OSError | None:
        refused = refusing(errno.EBUSY, "write ", f"{end} ")(operation, where, value)
        if refused and killed:
            raise Killed
        return refused

    settle(kernel, spec(group(mac=MACS[0])))
    kernel.fault = stop
    with suppress(Killed):
        settle(kernel, spec(group(mac=MACS[0], driver="vfio-pci")))
    kernel.fault = no_fault
    for mac in MACS:
        result = settle(kernel, spec(group(mac=mac, **back)))
        assert is_ready(result.conditions), result.conditions
        assert (driver(kernel.files, address(kernel, 1)), override(kernel)) == ("igbvf", "(null)")


def test_a_vf_bound_again_for_its_address_keeps_driver_and_override(kernel: Kernel) -> None:
    """`driverctl --noprobe` and an operator set an override for the next time that the VF is bound."""
    for theirs in ("igbvf", VFIO):
        for mac in MACS:
            settle(kernel, spec(group(mac=mac)))
            kernel.files.write(f"{PCI}/{address(kernel, 1)}/driver_override", theirs)
        assert is_ready(settle(kernel, spec(group(mac=MACS[0]))).conditions)
        assert (driver(kernel.files, address(kernel, 1)), override(kernel)) == ("igbvf", theirs)


def test_the_spec_s_network_driver_ends_another_program_s_override_to_vfio(kernel: Kernel) -> None:
    settle(kernel, spec(group(driver="netdevice")))
    kernel.files.write(f"{PCI}/{address(kernel, 1)}/driver_override", VFIO)
    changes = dry_run(kernel.machine(), spec(group(driver="netdevice"))).changes
    (change,) = [change for change in changes if change.kind == "bindings"]
    assert (change.field, change.before, change.disruption) == ("driver_override", VFIO, Disruption.NONE)
    assert is_ready(settle(kernel, spec(group(driver="netdevice"))).conditions)
    assert (driver(kernel.files, address(kernel, 1)), override(kernel)) == ("igbvf", "(null)")


def test_a_pf_for_vfio_is_not_ready_with_settings_of_a_netdev_unless_a_virtual_machine_has_it(kernel: Kernel) -> None:
    kernel.unbind(PF)
    kernel.set_driver(PF, "vfio-pci")
    kernel.tree.link(f"{PCI}/{PF}/iommu_group", "../../kernel/iommu_groups/7")
    assert is_ready(settle(kernel, spec()).conditions)
    (refused,) = settle(kernel, spec(mtu=9000)).outcomes
    assert (refused.result, "its driver vfio-pci creates no netdev" in refused.error) == ("blocked", True)
    kernel.host.open["/dev/vfio/7"] = ("qemu-system-x86 (pid 77)",)
    assert is_ready(settle(kernel, spec(mtu=9000)).conditions)


def test_an_open_iommu_group_counts_for_all_of_its_vfs(kernel: Kernel) -> None:
    """Behind a bridge that does not isolate its devices (no ACS) they have one group."""
    two = {"count": 4, "groups": [{"index": "1-2", "driver": "vfio-pci"}]}
    settle(kernel, spec(two))
    for index in (1, 2):
        kernel.tree.link(f"{PCI}/{address(kernel, index)}/iommu_group", "../../../../kernel/iommu_groups/7")
    kernel.host.open["/dev/vfio/7"] = ("qemu-system-x86 (pid 77)",)
    back = {"count": 4, "groups": [{"index": "1-2", "driver": "netdevice"}]}
    held = [o.change.affected for o in settle(kernel, spec(back)).outcomes if o.result == "deferred"]
    assert held == [(f"qemu-system-x86 (pid 77) ({PF}#{index})",) for index in (1, 2)]


def test_without_vfio_pci_the_plan_has_the_remedy_and_the_rest_is_applied() -> None:
    kernel = Kernel()
    kernel.add_nic(PF, NAME, MAC)
    (error,) = dry_run(kernel.machine(), spec(group(driver="vfio-pci"))).errors
    assert "vfio-pci is not loaded" in error
    assert 'kernel_modules = ["vfio-pci"]' in error
    result = settle(kernel, spec(group(driver="vfio-pci")))
    assert [o.change.target for o in undone(result)] == [f"{PF}#1"]
    assert driver(kernel.files, address(kernel, 1)) is None
    assert driver(kernel.files, address(kernel, 2)) == "igbvf"


def test_interrupts_of_a_virtual_machine_are_its_own(kernel: Kernel) -> None:
    wanted = spec(group(driver="vfio-pci"))
    settle(kernel, wanted)
    kernel.interrupts.request(address(kernel, 1), 200, "vfio-msix[0](0000:21:10.2)")
    assert settle(kernel, wanted).outcomes == ()
