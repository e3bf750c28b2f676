"""The sysfs of other network namespaces, on this machine's own kernel."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agent.linux import mount as detached_mounts
from agent.linux.namespaces import LinuxNamespaces, mounted
from agent.machine import Namespace
from tests import private_namespace

OWN, MOUNTS = Path("/proc/thread-self/ns/net"), Path("/proc/self/mountinfo")
MOUNTINFO = """\
22 1 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw
310 29 0:4 net:[4026532281] /run/netns/cni-1f shared:181 - nsfs nsfs rw
311 29 0:4 net:[4026532340] /run/docker/netns/a\\040b rw - nsfs nsfs rw
312 29 0:4 pid:[4026532999] /run/pidns rw - nsfs nsfs rw
313 29 0:4 net:[x] /run/odd rw - nsfs nsfs rw
314 29 0:4 net:[\u00b2] /run/odd rw - nsfs nsfs rw
315 29 0:4 net:[] /run/odd rw - nsfs nsfs rw
316 29 0:4 net:[4026532341] /run/netns/m\u00fc\u2028a rw - nsfs nsfs rw
"""
VETH = "ip link add eth1 numrxqueues 2 numtxqueues 4 type veth peer name eth2"


@contextmanager
def namespace(*unshared: str, setup: str = "true") -> Iterator[Namespace]:
    """A network namespace with a veth pair, for as long as a process lives in it."""
    with private_namespace.pod(*unshared, setup=f"{VETH} && {setup}") as made:
        path = f"/proc/{made}/ns/net"
        yield Namespace(Path(path).stat().st_ino, path)


@pytest.fixture
def pod() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


def mountinfo(namespace: Namespace) -> str:
    """That of the process which keeps the namespace."""
    return (Path(namespace.path).parent.parent / "mountinfo").read_text()


def held() -> int:
    """How many descriptors lead to a namespace, or to a mount that is nowhere ("/")."""
    targets = []
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):
            targets.append(str(Path(f"/proc/self/fd/{number}").readlink()))
    return len([to for to in targets if to.startswith("net:") or to == "/"])


def test_mounted_namespaces_are_read_from_mountinfo() -> None:
    assert mounted(MOUNTINFO) == [
        Namespace(4026532281, "/run/netns/cni-1f"),
        Namespace(4026532340, "/run/docker/netns/a b"),
        Namespace(4026532341, "/run/netns/m\u00fc\u2028a"),
    ]


def test_masks_are_written_in_another_namespace_and_nothing_is_left_behind(pod: Namespace) -> None:
    own, mounts, before = OWN.readlink(), MOUNTS.read_text(), held()
    with LinuxNamespaces().files(pod) as files:
        assert OWN.readlink() == own
        assert files.names("/sys/class/net") == ["eth1", "eth2", "lo"]
        files.write("/sys/class/net/eth1/queues/rx-1/rps_cpus", "1")
        assert int(files.read("/sys/class/net/eth1/queues/rx-1/rps_cpus"), 16) == 1
        files.write("/sys/class/net/eth1/queues/rx-0/rps_flow_cnt", "5")
        assert files.read("/sys/class/net/eth1/queues/rx-0/rps_flow_cnt") == "8", "rounded up to a power of two"
        assert held() == before + 1
        files.write("/sys/class/net/eth1/queues/tx-1/xps_cpus", "1")
        assert int(files.read("/sys/class/net/eth1/queues/tx-1/xps_cpus"), 16) == 1
    assert not Path("/sys/class/net/eth2").exists()
    assert MOUNTS.read_text() == mounts
    assert held() == before


def test_a_container_s_read_only_sysfs_is_written_and_stays_read_only(tmp_path: Path) -> None:
    mount = f"mount -t sysfs -o ro sysfs {tmp_path}"
    with namespace("--mount", setup=mount) as container, LinuxNamespaces().files(container) as files:
        path = "/sys/class/net/eth1/queues/rx-0/rps_cpus"
        files.write(path, "1")
        assert int(files.read(path), 16) == 1
        inside = Path(container.path).parent.parent / "root" / str(tmp_path)[1:] / path.removeprefix("/sys/")
        assert int(inside.read_text(), 16) == 1
        with pytest.raises(OSError, match="Read-only"):
            inside.write_text("0")
        (line,) = [line for line in mountinfo(container).splitlines() if f" {tmp_path} " in line]
        assert line.split(" - ")[1].split()[2].split(",")[0] == "ro", "the file system, not only its mount"


def test_a_number_that_another_process_has_by_now_is_not_entered(pod: Namespace) -> None:
    with pytest.raises(FileNotFoundError), LinuxNamespaces().files(Namespace(pod.inode + 1, pod.path)):
        pass


def test_a_function_that_is_in_no_namespace_is_not_found(pod: Namespace) -> None:
    own = OWN.readlink()
    assert LinuxNamespaces().holding(["0000:ff:1f.7"]) == {}
    assert OWN.readlink() == own


def test_other_namespaces_can_be_searched_where_sysfs_can_be_mounted(pod: Namespace) -> None:
    assert LinuxNamespaces().searchable()


def test_before_linux_5_2_no_other_namespace_can_be_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(filesystem: str) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(detached_mounts, "detached", refuse)
    assert not LinuxNamespaces().searchable()
