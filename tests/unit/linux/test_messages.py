"""Dumps of tables that change while they are read."""

import errno
import socket

import pytest
from pyroute2.netlink import NLM_F_DUMP_INTR

from agent.linux.messages import HEADER
from agent.linux.netlink import LinuxNetlink


class Changing(socket.socket):
    """A socket of netlink that marks its first answers, as many as ``left``: the table changed while it was read."""

    left = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        if Changing.left == 0:
            return data
        Changing.left -= 1
        length, kind, given, sequence, port = HEADER.unpack_from(data)
        return HEADER.pack(length, kind, given | NLM_F_DUMP_INTR, sequence, port) + data[HEADER.size :]


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch) -> type[Changing]:
    monkeypatch.setattr(socket, "socket", Changing)
    monkeypatch.setattr(Changing, "left", 0)
    return Changing


def test_a_table_that_has_changed_is_read_again(changing: type[Changing]) -> None:
    addresses = LinuxNetlink().addresses()
    changing.left = 20
    assert LinuxNetlink().addresses() == addresses
    assert changing.left == 0


def test_a_table_that_changes_each_time_is_not_read_in_part(changing: type[Changing]) -> None:
    changing.left = 100_000
    with pytest.raises(OSError, match="changed during each of 50 readings; try again") as refused:
        LinuxNetlink().addresses()
    assert refused.value.errno == errno.EAGAIN


def test_after_a_reading_that_was_given_up_the_next_one_is_made(changing: type[Changing]) -> None:
    """The kernel answers EBUSY to a socket whose last dump was not read to its end (calico 9769)."""
    netlink = LinuxNetlink()
    changing.left = 100_000
    with pytest.raises(OSError, match="changed during each"):
        netlink.addresses()
    changing.left = 0
    assert netlink.addresses() == LinuxNetlink().addresses()
