"""Sysctls, module parameters and huge pages of the host, and the largest PCIe read request of a device."""

import errno

import pytest

from agent.engine.converge import Pass
from agent.engine.originals import Originals
from agent.engine.retry import Failures
from agent.report.records import Disruption, Outcome
from agent.report.verdict import is_ready
from agent.spec import sysctl_names
from tests.sim import config_space, hugepages, passes
from tests.sim.kernel import Kernel
from tests.sim.passes import spec_of
from tests.sim.refusing import refusing
from tests.sim.two_nics import two_nics

PF = "0000:21:00.0"
CONFIG = f"/sys/bus/pci/devices/{PF}/config"
NODE1 = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages"


@pytest.fixture
def kernel() -> Kernel:
    kernel = two_nics()
    kernel.tree.put("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456")
    kernel.tree.put("/sys/module/nvme_core/parameters/io_timeout", "30")
    return kernel


def settle(
    kernel: Kernel,
    nic: dict[str, object] | None = None,
    failures: Failures | None = None,
    originals: Originals | None = None,
    now: float = 0.0,
    **wanted: object,
) -> Pass:
    nics = [{"name": "rail0", "select": {"pci": PF}, **(nic or {})}]
    spec = spec_of(*nics, **wanted)
    return passes.settle(kernel, spec, now=now, failures=failures, originals=originals)


def only(result: Pass, kind: str) -> Outcome:
    """The one change of a kind that was not made."""
    (outcome,) = passes.undone(result, kind)
    return outcome


def test_sysctls_are_set_and_their_white_space_does_not_count(kernel: Kernel) -> None:
    wanted = {"net.ipv4.tcp_rmem": "4096 131072  6291456", "net.ipv4.ip_local_port_range": "1024 65535"}
    result = settle(kernel, sysctls=wanted)
    assert is_ready(result.conditions)
    assert kernel.files.read("/proc/sys/net/ipv4/ip_local_port_range") == "1024\t65535"
    assert [path for path, _ in kernel.writes if path.startswith("/proc/sys")] == [
        "/proc/sys/net/ipv4/ip_local_port_range"
    ]


@pytest.mark.parametrize(
    ("name", "wanted", "shown"),
    [
        ("net.ipv4.ip_local_reserved_ports", "30000-30000", "30000"),
        ("net.ipv4.ip_local_reserved_ports", "30001,30000", "30000-30001"),
        ("net.core.somaxconn", "0x403", "1027"),
        ("net.ipv4.ip_local_port_range", "0x8001  60999", "32769\t60999"),
    ],
)
def test_a_value_in_another_notation_than_the_kernel_s_is_written_once_and_taken_back(
    kernel: Kernel, name: str, wanted: str, shown: str
) -> None:
    path, originals = sysctl_names.path(name), Originals()
    before = kernel.files.read(path)
    for _ in range(2):
        assert is_ready(settle(kernel, originals=originals, sysctls={name: wanted}).conditions)
        assert kernel.files.read(path) == shown
    assert [text for at, text in kernel.writes if at == path] == [" ".join(wanted.split())]
    settle(kernel, originals=originals)
    assert kernel.files.read(path) == before


def test_whether_a_netdev_forwards_is_as_it_was_before_the_node_was_a_router(kernel: Kernel) -> None:
    of_all, of_one, originals = "net.ipv4.ip_forward", "net.ipv4.conf.enp33s0.forwarding", Originals()
    paths = [sysctl_names.path(of_all), sysctl_names.path(of_one)]
    for _ in range(2):
        assert is_ready(settle(kernel, originals=originals, sysctls={of_all: "1", of_one: "0"}).conditions)
        assert [kernel.files.read(path) for path in paths] == ["1", "0"]
    settle(kernel, originals=originals)
    assert [kernel.files.read(path) for path in paths] == ["0", "0"]


def test_the_order_of_congestion_controls_does_not_matter(kernel: Kernel) -> None:
    name = "net.ipv4.tcp_allowed_congestion_control"
    kernel.tree.put(sysctl_names.path(name), "reno cubic")
    assert is_ready(settle(kernel, sysctls={name: "cubic reno"}).conditions)
    assert sysctl_names.path(name) not in [path for path, _ in kernel.writes]


def test_a_value_that_the_kernel_changes_is_a_failure_and_is_taken_back(kernel: Kernel) -> None:
    path, originals = sysctl_names.path("net.ipv4.ip_local_port_range"), Originals()
    result = settle(kernel, originals=originals, sysctls={"net.ipv4.ip_local_port_range": "20000"})
    assert only(result, "sysctls").error.endswith(" 20000 60999")
    settle(kernel, originals=originals)
    assert kernel.files.read(path) == "32768\t60999"


def test_what_an_administrator_writes_instead_of_a_value_that_the_kernel_refuses_stays(kernel: Kernel) -> None:
    path, originals = sysctl_names.path("net.core.somaxconn"), Originals()
    result = settle(kernel, originals=originals, sysctls={"net.core.somaxconn": "1e3"})
    assert only(result, "sysctls").error.endswith(" the value '1e3'")
    kernel.tree.put(path, "1000")
    settle(kernel, originals=originals)
    assert kernel.files.read(path) == "1000"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("net.ipv4.conf.rail0v1.rp_filter", "see whether the netdev rail0v1 is there, or take"),
        ("net.ipv6.neigh.eth0/100.retrans_time_ms", "see whether the netdev eth0.100 is there, or take"),
        ("net.ipv4.conf.all.made_up", "load the module that provides net.ipv4.conf.all.made_up, or take"),
        ("net.netfilter.nf_conntrack_max", "load the module that provides net.netfilter.nf_conntrack_max, or take"),
    ],
)
def test_a_sysctl_that_this_kernel_lacks_is_unsupported_later(kernel: Kernel, name: str, remedy: str) -> None:
    failures, wanted = Failures(), {name: "2"}
    assert only(settle(kernel, sysctls=wanted, failures=failures), "sysctls").result == "blocked"
    assert failures.next_try() == 5.0
    result = settle(kernel, sysctls=wanted, failures=failures, now=5.0)
    outcome = only(result, "sysctls")
    assert (outcome.result, outcome.error) == ("unsupported", "this kernel has no such parameter")
    assert outcome.remedy.startswith(remedy)
    assert not is_ready(result.conditions)


def test_a_sysctl_that_comes_late_with_its_module_is_set_then(kernel: Kernel) -> None:
    """nf_conntrack is loaded after the sysctls were set (https://github.com/coreos/bugs/issues/785)."""
    failures, wanted = Failures(), {"net.netfilter.nf_conntrack_max": "131072"}
    for now in (0.0, 5.0, 600.0):
        result = settle(kernel, sysctls=wanted, failures=failures, now=now)
    assert only(result, "sysctls").result == "unsupported"
    kernel.tree.put("/proc/sys/net/netfilter/nf_conntrack_max", "65536")
    assert is_ready(settle(kernel, sysctls=wanted, failures=failures, now=601.0).conditions)
    assert kernel.files.read("/proc/sys/net/netfilter/nf_conntrack_max") == "131072"


def test_a_sysctl_that_cannot_be_read_is_a_blocker(kernel: Kernel) -> None:
    kernel.tree.put("/proc/sys/vm/drop_caches", "")
    kernel.unreadable.add("/proc/sys/vm/drop_caches")
    outcome = only(settle(kernel, sysctls={"vm.drop_caches": "1"}), "sysctls")
    assert outcome.result == "blocked"
    assert "it is an action, or has no value yet" in outcome.error


@pytest.mark.parametrize("value", ["Y", "y", "1", "yes", "on"])
def test_a_module_s_boolean_has_several_spellings(kernel: Kernel, value: str) -> None:
    result = settle(kernel, module_parameters={"ib-core": {"netns-mode": value}})
    assert is_ready(result.conditions)


def test_a_writable_parameter_of_a_loaded_module_is_written(kernel: Kernel) -> None:
    assert is_ready(settle(kernel, module_parameters={"nvme-core": {"io_timeout": "0xff"}}).conditions)
    assert kernel.files.read("/sys/module/nvme_core/parameters/io_timeout") == "0xff"


def test_a_module_s_number_may_have_any_base(kernel: Kernel) -> None:
    settle(kernel, module_parameters={"nvme_core": {"io_timeout": "0x1e"}})
    assert [path for path, _ in kernel.writes if "io_timeout" in path] == []


def test_a_parameter_that_is_taken_only_at_loading_waits_for_a_reload(kernel: Kernel) -> None:
    wanted = {"ib_core": {"netns_mode": "N"}}
    for allow, result in (("vf-reset", "deferred"), ("reboot", "unsupported")):
        last_pass = settle(kernel, module_parameters=wanted, disruption={"allow": allow})
        outcome = only(last_pass, "module_parameters")
        assert (outcome.result, outcome.change.disruption) == (result, Disruption.REBOOT)
        assert "options ib_core netns_mode=N" in outcome.remedy
        assert "reload ib_core or reboot" in outcome.remedy
        assert not is_ready(last_pass.conditions)


def test_a_module_that_is_not_loaded_and_a_parameter_that_it_lacks_are_blockers(kernel: Kernel) -> None:
    wanted = {"mlx5_core": {"probe_vf": "N"}, "nvme_core": {"timeout": "9"}}
    result = settle(kernel, module_parameters=wanted)
    unloaded, lacks = [o for o in result.outcomes if o.change.kind == "module_parameters"]
    assert (unloaded.result, lacks.result) == ("blocked", "blocked")
    assert "mlx5_core is not loaded" in unloaded.error and "(it has io_timeout)" in lacks.error


def test_a_pool_is_made_smaller_than_its_use_without_freeing_pages_in_use(kernel: Kernel) -> None:
    settle(kernel, hugepages=[{"size": "2M", "count": 16, "numa_node": 1}])
    hugepages.use(kernel, node=1, size=2048, pages=10)
    smaller = [{"size": "2M", "count": 4, "numa_node": 1}]
    assert is_ready(settle(kernel, hugepages=smaller).conditions)
    assert kernel.files.read(NODE1) == "10", "what is in use stays until its users are through"
    kernel.writes.clear()
    settle(kernel, hugepages=smaller)
    assert kernel.writes == []


def test_a_pool_of_a_numa_node_that_is_not_there_is_a_blocker(kernel: Kernel) -> None:
    result = settle(kernel, hugepages=[{"size": "2M", "count": 1, "numa_node": 9}])
    assert only(result, "hugepages").error == "there is no NUMA node 9 with memory"


def test_the_largest_read_request_is_set_and_the_rest_of_the_register_kept(kernel: Kernel) -> None:
    result = settle(kernel, {"max_read_request": 4096})
    assert is_ready(result.conditions)
    at = config_space.DEVICE_CONTROL
    assert int.from_bytes(kernel.config[CONFIG][at : at + 2], "little") == 0x5810
    assert kernel.writes.count((CONFIG, "1058")) == 1


def test_a_function_without_pci_express_is_a_blocker(kernel: Kernel) -> None:
    kernel.config[CONFIG][0x06] = 0
    outcome = only(settle(kernel, {"max_read_request": 512}), "max_read_request")
    assert (outcome.result, outcome.error) == ("blocked", "it has no PCI Express capability")


def test_who_is_not_root_is_told_so_and_not_that_the_device_is_an_old_one(kernel: Kernel) -> None:
    """The kernel shows 64 bytes of the configuration space to anybody, and the rest to root (pci_read_config)."""
    kernel.config[CONFIG] = kernel.config[CONFIG][:64]
    outcome = only(settle(kernel, {"max_read_request": 512}), "max_read_request")
    assert (outcome.result, outcome.error, outcome.remedy) == ("blocked", "only root may read it", "run as root")


def test_a_locked_down_kernel_makes_the_read_request_unsupported(kernel: Kernel) -> None:
    kernel.fault = refusing(errno.EPERM, CONFIG)
    outcome = only(settle(kernel, {"max_read_request": 4096}), "max_read_request")
    assert outcome.result == "unsupported"
    assert "locked down" in outcome.error
