"""Who uses a host that is to be rebooted. These tests run the script on files that are made here."""

from pathlib import Path

import pytest

from tasks.drivers.ofed.users import PEER_MEMORY, STORAGE
from tasks.reboot_users import _USERS, RebootUsers
from tests.deploy.scripts import process, sh
from tests.stand_ins import program, text_file

POD = "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope"


def users(root: Path, of: str) -> list[str]:
    return RebootUsers().process(
        sh(_USERS, root, " ".join(STORAGE), " ".join(PEER_MEMORY), of, PATH=f"{root / 'bin'}:/usr/bin:/bin")
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node with a program of its own and one of a pod, each with a GPU and an RDMA device, and with storage of both."""
    system, daemon = "0::/system.slice/a.service", "0::/system.slice/nvidia-persistenced.service"
    process(tmp_path, 1, "systemd", cgroup="0::/init.scope")
    process(tmp_path, 20, "nvidia-persiste", "/dev/nvidiactl", cgroup=daemon)
    process(tmp_path, 21, "nv-hostengine", "/dev/nvidiactl", cgroup=system)
    process(tmp_path, 30, "python3", "/dev/nvidia0", "/dev/infiniband/uverbs0", cgroup=system)
    process(tmp_path, 31, "nvidia-device-p", "/dev/nvidiactl", "/dev/infiniband/uverbs1", cgroup=POD)
    process(tmp_path, 32, "qemu (x) y", "/dev/vfio/12", cgroup=system)
    mounts = [
        "/dev/vda / ext4 rw 0 0",
        "a:/ /data nfs4 rw,proto=rdma 0 0",
        "a:/b /var/lib/kubelet/pods/1/v nfs4 rw,proto=rdma 0 0",
    ]
    (tmp_path / "proc/1/mounts").write_text("\n".join(mounts) + "\n")
    nvme = tmp_path / "sys/class/nvme/nvme0"
    text_file(nvme / "transport", "rdma\n")
    for name in ("rdma", "ip", "ss"):
        program(tmp_path / "bin" / name)
    return tmp_path


OWN = {
    "/data is mounted over RDMA",
    "python3 (pid 30) has uverbs0 open",
    "python3 (30) has a GPU open",
    "qemu (x) y (32) has a VFIO device open",
}
OF_DAEMONS = {"nvidia-device-p (pid 31) has uverbs1 open", "nvidia-device-p (31) has a GPU open"}
STORAGE_LEFT = {"nvme0 is NVMe over RDMA", "/var/lib/kubelet/pods/1/v is mounted over RDMA"}


@pytest.mark.parametrize(
    ("of", "counting"),
    [("host", OWN | OF_DAEMONS | STORAGE_LEFT), ("node to drain", OWN), ("drained node", OWN | STORAGE_LEFT)],
    ids=["all of no cluster", "what a drain does not end", "all but pods of daemonsets"],
)
def test_what_counts_depends_on_the_drain(root: Path, of: str, counting: set[str]) -> None:
    assert set(users(root, of)) == counting
