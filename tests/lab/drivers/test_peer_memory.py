"""GPU peer memory on a real node, with modules that have the names of NVIDIA's (lab/packages/gpu) and no GPU."""

import shlex
import subprocess

import pytest

from lab import Node
from lab.packages import gpu
from tests.lab.conftest import changed, deploy, refusal

AT_BOOT = "/etc/modules-load.d/trackbed-peer-memory.conf"
LOADED = "test -e /sys/module/nvidia_peermem"


MODULE, DMA_BUF = {"method": "nvidia_peermem"}, {"method": "dma-buf"}


def install_modules(node: Node) -> None:
    """Put them where a package of NVIDIA's would."""
    for module in gpu.modules(node.image):
        command = ["scp", "-q", "-F", str(node.ssh_config), str(module), f"{node.name}:/tmp/"]
        subprocess.run(command, check=True)
        node.sh(f"install -D -m 644 -t /lib/modules/$(uname -r)/updates /tmp/{shlex.quote(module.name)}")
    node.sh("depmod")


@pytest.mark.campaign
def test_the_module_is_loaded_now_and_at_boot_and_dma_buf_needs_none(node: Node) -> None:
    assert "has no module nvidia_peermem" in refusal(deploy(peer_memory=MODULE))
    assert node.run(["test", "-e", AT_BOOT]).returncode != 0

    install_modules(node)
    assert changed(deploy(peer_memory=MODULE)) == [
        "GPU peer memory | nvidia_peermem now",
        "GPU peer memory | nvidia_peermem at boot",
    ]
    node.sh(LOADED)
    assert changed(deploy(peer_memory=MODULE)) == []
    # As systemd does at boot.
    node.sh(f"modprobe -r nvidia_peermem; /usr/lib/systemd/systemd-modules-load; {LOADED}")

    assert changed(deploy(peer_memory=DMA_BUF)) == ["GPU peer memory | No nvidia_peermem at boot"]
