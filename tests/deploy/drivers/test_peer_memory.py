import pytest

from tasks.drivers import peer_memory
from tasks.drivers.peer_memory import PeerMemorySupport
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import Node, file_answers, of

SUPPORT = of(PeerMemorySupport)
AT_BOOT = "# Written by Trackbed; changes here are overwritten.\nnvidia_peermem\n"
OPEN = "driver Dual MIT/GPL"


def test_the_module_is_loaded_now_and_at_boot(node: Node) -> None:
    node.data = {"peer_memory": {"method": "nvidia_peermem"}}
    result = node.deploy(peer_memory.configure, {SUPPORT: ["installed", OPEN]})
    [load] = result.commands["GPU peer memory | nvidia_peermem now"]
    assert 'modprobe -- "$1"' in load
    assert " sh nvidia_peermem " in load
    assert result.uploads == {peer_memory.AT_BOOT: AT_BOOT.encode()}


def test_nothing_is_done_if_all_is_in_place(node: Node) -> None:
    there = {SUPPORT: ["loaded", "installed", OPEN], **file_answers(peer_memory.AT_BOOT, AT_BOOT)}
    assert node.deploy(peer_memory.configure, there, peer_memory={"method": "nvidia_peermem"}).did_nothing


def test_dma_buf_needs_no_module(node: Node) -> None:
    node.data = {"peer_memory": {"method": "dma-buf"}}
    result = node.deploy(peer_memory.configure, {SUPPORT: ["dma-buf", OPEN]})
    assert not any(result.planned.values())
    there = {SUPPORT: ["dma-buf", OPEN], **file_answers(peer_memory.AT_BOOT, AT_BOOT)}
    assert node.deploy(peer_memory.configure, there).flat == [f"rm -f {peer_memory.AT_BOOT}"]


@pytest.mark.parametrize("method", ["nvidia_peermem", "dma-buf"])
def test_the_kernel_that_is_to_run_is_waited_for(node: Node, method: str) -> None:
    node.data = {"peer_memory": {"method": method}, "kernel": {"release": "6.1.0-10-amd64"}}
    result = node.deploy(peer_memory.configure, {SUPPORT: [], "uname -r": "6.1.0-9-amd64"})
    assert not result.failed
    assert not any("modprobe" in command for command in result.flat)
    assert node.deploy(peer_memory.configure, {SUPPORT: [], "uname -r": "6.1.0-10-amd64"}).failed


@pytest.mark.parametrize("task", ["gpu_driver", "ofed"])
def test_the_module_waits_for_the_reboot_that_loads_what_it_needs(node: Node, task: str) -> None:
    """With the kernel's own drivers loaded it does not load; if that failed the host, the reboot would never come."""
    node.data = {"peer_memory": {"method": "nvidia_peermem"}, "reboot": {"policy": "allow"}}
    requests = {of(NodeRebootRequests): ["boot-1", f"{task} boot-1 nouveau is loaded "]}
    result = node.deploy(peer_memory.configure, {SUPPORT: ["installed", OPEN], **requests})
    assert not result.failed
    assert not any("modprobe" in command for command in result.flat)
    assert result.uploads == {peer_memory.AT_BOOT: AT_BOOT.encode()}
    other = {of(NodeRebootRequests): ["boot-1", "kernel boot-1 another runs "]}
    assert "modprobe" in node.deploy(peer_memory.configure, {SUPPORT: ["installed", OPEN], **other}).flat[0]


@pytest.mark.parametrize(
    ("method", "message", "refused"),
    [
        ("nvidia_peermem", [OPEN], "the running kernel has no module nvidia_peermem"),
        ("dma-buf", ["dma-buf"], "NVIDIA's driver is not installed"),
        ("dma-buf", ["dma-buf", "driver NVIDIA"], "the licence of nvidia is NVIDIA; install"),
        ("dma-buf", [OPEN], "the kernel's RDMA does not support dma-buf"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(node: Node, method: str, message: list[str], refused: str) -> None:
    result = node.deploy(peer_memory.configure, {SUPPORT: message}, peer_memory={"method": method})
    assert refused in result.refusal
    # Nothing that was to come after it.
    assert result.uploads == {}
