"""The DCB messages, byte for byte as iproute2's `dcb` sends them, and answers as Linux 6.1 gave them."""

import errno

from agent.linux.dcb import IEEE_DEL, IEEE_GET, IEEE_SET, app_table, decode, refusal_in, request
from agent.linux.messages import attributes


def test_dcb_requests_have_the_bytes_of_iproute2() -> None:
    """Seen with `strace -e write=all dcb ... dev v0` of iproute2 6.1, without the header."""
    assert request(IEEE_GET, "v0") == bytes.fromhex("00150000 0700010076300000")
    added = request(IEEE_SET, "v0", app_table({(27, 3), (26, 3)}))
    assert added == bytes.fromhex("00140000 0700010076300000 18000d80 14000380 0800010005031a00 0800010005031b00")
    removed = request(IEEE_DEL, "v0", app_table({(26, 3)}))
    assert removed == bytes.fromhex("001b0000 0700010076300000 10000d80 0c000380 0800010005031a00")


def test_each_entry_of_a_dscp_is_read() -> None:
    """Beside them an entry for a TCP port (selector 2): dcb_app_type in net/dcb/dcbnl.c keeps all kinds in one table."""
    table = bytes.fromhex("1c000380 0800010005031a00 0800010005051a00 080001000203bc0c")
    assert decode(table).dscp == {(26, 3), (26, 5)}


def test_a_driver_s_refusal_is_read_from_the_answer_s_octet() -> None:
    assert refusal_in(bytes.fromhex("00140000 05000d00a1000000")) == errno.EOPNOTSUPP
    assert refusal_in(bytes.fromhex("00140000 05000d0000000000")) == 0
    assert refusal_in(bytes.fromhex("00140000")) == 0


def test_parsing_attributes_ends_at_an_impossible_length() -> None:
    assert list(attributes(bytes.fromhex("05000180ff000000 0300"))) == [(1, b"\xff")]
    assert list(attributes(bytes(8))) == []
