"""Users of a part of a function use the function. Parts are subfunctions, and virtio devices of vDPA."""

import pytest

from agent.engine.users import User
from agent.machine import Link
from tests.sim.engine.test_disruption import PF, spec
from tests.sim.engine.test_users import owning, users_of
from tests.sim.kernel import Kernel, Netdev
from tests.sim.passes import settle


@pytest.fixture
def subfunction(kernel: Kernel) -> str:
    """The folder of a subfunction of the PF, whose netdev is up."""
    settle(kernel, spec())
    folder = f"/sys/bus/pci/devices/{PF}/mlx5_core.sf.4"
    kernel.netdevs["enp33s0f0s88"] = Netdev("", Link(88, "enp33s0f0s88", "02:00:00:00:00:88", "", 1500, True, True))
    kernel.tree.folder(f"{folder}/net/enp33s0f0s88")
    for path in (f"{folder}/mlx5_core.eth.4", f"/sys/bus/pci/devices/{PF}/mlx5_core.eth.0"):
        kernel.tree.link(f"{path}/driver", "../../../bus/auxiliary/drivers/mlx5_core.eth")
    kernel.tree.put("/sys/class/net/enp33s0f0s88/ifindex", "88")
    assert users_of(kernel) == {}
    return folder


def test_what_uses_the_netdev_of_a_subfunction_uses_the_function(kernel: Kernel, subfunction: str) -> None:
    kernel.routed.add("enp33s0f0s88")
    kernel.uppers_elsewhere["enp33s0f0s88"] = ("net1",)
    names = ("a route through enp33s0f0s88", "net1 on enp33s0f0s88, in another network namespace")
    assert users_of(kernel) == {PF: tuple(map(User, names))}
    assert owning(kernel) == {}


def test_a_subfunction_whose_netdev_was_moved_uses_the_function(kernel: Kernel, subfunction: str) -> None:
    """One without a driver has no netdev."""
    kernel.tree.remove(f"{subfunction}/net")
    assert users_of(kernel) == {PF: (User("mlx5_core.sf.4 in another network namespace"),)}
    kernel.tree.unlink(f"{subfunction}/mlx5_core.eth.4/driver")
    assert users_of(kernel) == {}


@pytest.mark.parametrize("below", ["", "/mlx5_core.sf.4"])
def test_the_netdev_that_virtio_vdpa_made_of_a_function_has_users(kernel: Kernel, below: str) -> None:
    settle(kernel, spec())
    folder = f"/sys/bus/pci/devices/{PF}{below}/virtio3"
    kernel.tree.link(f"{folder}/driver", "../../../bus/virtio/drivers/virtio_net")
    kernel.tree.folder(f"{folder}/net/eth7")
    kernel.netdevs["eth7"] = Netdev("", Link(77, "eth7", "02:00:00:00:00:77", "", 1500, True, True))
    kernel.tree.put("/sys/class/net/eth7/ifindex", "77")
    assert users_of(kernel) == {}
    kernel.routed.add("eth7")
    assert users_of(kernel) == {PF: (User("a route through eth7"),)}
    kernel.tree.remove(f"{folder}/net")
    assert users_of(kernel) == {PF: (User("virtio3 in another network namespace"),)}


@pytest.mark.parametrize("name", ["net", "power", "driver", "5"])
def test_a_device_that_is_called_like_a_file_of_the_function_is_no_part_of_it(kernel: Kernel, name: str) -> None:
    """Another plugin may give its devices any names."""
    settle(kernel, spec())
    kernel.host.allocated[name] = ("team/other",)
    assert users_of(kernel) == {}
