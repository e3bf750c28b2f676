"""The kernel's own inotify reports who owns CPUs: the kubelet's file, which is replaced, and cpusets of cgroups."""

from multiprocessing.connection import wait
from pathlib import Path

from agent.linux.file_events import subscribe
from agent.machine import Event, EventSource
from agent.runtime import write_atomically


def replaced(*paths: Path) -> EventSource:
    source, _ = subscribe([str(path) for path in paths], "/no/cgroups")
    return source


def cpusets(root: Path) -> EventSource:
    _, source = subscribe([], str(root))
    return source


def heard(source: EventSource, timeout: float = 10) -> list[Event]:
    """The events that come, once anything has."""
    ready = wait([source.fileno()], timeout)
    events, lost = source.receive() if ready else ([], False)
    assert not lost
    return events


def quiet(source: EventSource) -> bool:
    """Whether nothing has come. The kernel queues an event before the call that causes it returns."""
    return all(heard(source, timeout=0) == [] for _ in range(2))


def test_a_file_that_is_replaced_or_removed_concerns_every_device(tmp_path: Path) -> None:
    path = tmp_path / "kubelet/cpu_manager_state"
    path.parent.mkdir()
    source = replaced(path)
    assert quiet(source)
    for _ in range(2):
        write_atomically(path, "{}")
        assert heard(source) == [Event(every_device=True)]
        assert quiet(source)
    write_atomically(tmp_path / "kubelet/memory_manager_state", "{}")
    assert quiet(source)
    path.unlink()
    assert heard(source) == [Event(every_device=True)]


def test_a_file_of_a_pattern_concerns_every_device(tmp_path: Path) -> None:
    """A claim's file comes and goes with the claim; other drivers have theirs beside it."""
    source = replaced(tmp_path / "run/cdi/dra.k8s.io-cpu_*.json")
    claim = tmp_path / "run/cdi/dra.k8s.io-cpu_claim-1.json"
    claim.parent.mkdir(parents=True)
    assert heard(source) == [Event(every_device=True)]
    write_atomically(tmp_path / "run/cdi/nvidia.json", "{}")
    assert quiet(source)
    write_atomically(claim, "{}")
    assert heard(source) == [Event(every_device=True)]
    claim.unlink()
    assert heard(source) == [Event(every_device=True)]


def test_a_folder_may_come_later_and_go(tmp_path: Path) -> None:
    """A node may get its kubelet while the agent runs."""
    path = tmp_path / "var/lib/kubelet/cpu_manager_state"
    source = replaced(path, tmp_path / "snap/kubelet/cpu_manager_state")
    for _ in range(2):
        path.parent.mkdir(parents=True)
        assert heard(source) == [Event(every_device=True)]
        assert quiet(source)
        write_atomically(path, "{}")
        assert heard(source) == [Event(every_device=True)]
        path.unlink()
        path.parent.rmdir()
        assert heard(source) == [Event(every_device=True)]
        assert quiet(source)
        path.parent.parent.rmdir()
        path.parent.parent.parent.rmdir()
        heard(source)
        assert quiet(source)


def test_a_subscription_ends_with_its_source(tmp_path: Path) -> None:
    source = replaced(tmp_path / "cpu_manager_state")
    descriptor = Path(f"/proc/self/fd/{source.fileno()}")
    assert str(descriptor.readlink()) == "anon_inode:inotify"
    del source
    assert not descriptor.is_symlink()


def put(group: Path, file: str, text: str) -> None:
    (group / file).write_text(text)


def test_a_partition_that_is_made_changed_or_removed_concerns_every_device(tmp_path: Path) -> None:
    (tmp_path / "system.slice").mkdir()
    source = cpusets(tmp_path)
    assert quiet(source)
    put(tmp_path / "system.slice", "memory.max", "1000")
    put(tmp_path, "cgroup.subtree_control", "+cpuset")
    assert quiet(source)
    (tmp_path / "rt.slice").mkdir()
    assert heard(source) == [Event(every_device=True)]
    for group in (tmp_path / "system.slice", tmp_path / "rt.slice"):
        for file, text in (("cpuset.cpus", "1"), ("cpuset.cpus.partition", "isolated")):
            put(group, file, text)
            assert heard(source) == [Event(every_device=True)]
            assert quiet(source)
    for path in group.iterdir():
        path.unlink()
    group.rmdir()
    assert heard(source) == [Event(every_device=True)]
    assert quiet(source)


def test_a_partition_below_a_cgroup_with_exclusive_cpus_concerns_every_device(tmp_path: Path) -> None:
    outer, inner = tmp_path / "kubepods.slice", tmp_path / "kubepods.slice/pod.slice"
    inner.mkdir(parents=True)
    source = cpusets(tmp_path)
    put(inner, "cpuset.cpus.exclusive", "")
    assert quiet(source)
    put(outer, "cpuset.cpus.exclusive", "2-3\n")
    assert heard(source) == [Event(every_device=True)]
    put(inner, "cpuset.cpus.partition", "isolated")
    assert heard(source) == [Event(every_device=True)]
    (outer / "other.slice").mkdir()
    assert heard(source) == [Event(every_device=True)]
    put(outer / "other.slice", "cpuset.cpus.partition", "root")
    assert heard(source) == [Event(every_device=True)]
    assert quiet(source)
