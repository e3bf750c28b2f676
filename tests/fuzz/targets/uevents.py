"""Uevents, of the kernel and of udev."""

from collections.abc import Sequence

from agent.linux.events import uevent_events
from agent.service.wake import KnownDevices, scope_of


def check(data: bytes) -> None:
    """Read one message, and find the device that it concerns."""
    for event in uevent_events(data, False):
        scope_of(event, KnownDevices({7: "0000:21:00.0"}, {"0000:21:00.0": "0000:21:00.0"}))


def seeds() -> Sequence[bytes]:
    """One message of each group and subsystem."""
    path = b"/devices/pci0000:20/0000:20:00.0/0000:21:00.0/net/ens1"
    return [
        b"add@%s\0ACTION=add\0DEVPATH=%s\0SUBSYSTEM=%s\0SEQNUM=1\0" % (path, path, subsystem)
        for subsystem in (b"net", b"pci", b"cpu", b"infiniband")
    ] + [b"libudev\0" + bytes(32) + b"ACTION=bind\0DEVPATH=%s\0SUBSYSTEM=pci\0" % path]
