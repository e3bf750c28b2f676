"""The kernel's own inotify reports files that are replaced, as the kubelet's file of the CPUs of pods."""

from multiprocessing.connection import wait
from pathlib import Path

from agent.linux.events import replaced
from agent.machine import Event, EventSource
from agent.runtime import write_atomically


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
    (source,) = replaced([str(path)])
    assert quiet(source)
    for _ in range(2):
        write_atomically(path, "{}")
        assert heard(source) == [Event(every_device=True)]
        assert quiet(source)
    write_atomically(tmp_path / "kubelet/memory_manager_state", "{}")
    assert quiet(source)
    path.unlink()
    assert heard(source) == [Event(every_device=True)]


def test_a_folder_may_come_later_and_go(tmp_path: Path) -> None:
    """A node may get its kubelet while the agent runs."""
    path = tmp_path / "var/lib/kubelet/cpu_manager_state"
    (source,) = replaced([str(path), str(tmp_path / "snap/kubelet/cpu_manager_state")])
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
    (source,) = replaced([str(tmp_path / "cpu_manager_state")])
    descriptor = Path(f"/proc/self/fd/{source.fileno()}")
    assert str(descriptor.readlink()) == "anon_inode:inotify"
    del source
    assert not descriptor.is_symlink()
