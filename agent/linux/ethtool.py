"""ethtool's generic netlink family, by pyroute2. The messages are defined here, since pyroute2 lacks most of them.

include/uapi/linux/ethtool_netlink.h has the commands and attributes, and Documentation/networking/ethtool-netlink.rst explains
them.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from typing import Any

from attrs import frozen
from pyroute2.netlink import NLM_F_ACK, NLM_F_REQUEST, genlmsg
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.generic.ethtool import ETHTOOL_GENL_NAME, ETHTOOL_GENL_VERSION, ethtoolbitset, ethtoolheader

from agent.linux import ethtool_ioctl
from agent.linux.messages import ignoring
from agent.linux.sockets import close_with, generic
from agent.machine import Group, Setting

FEATURES_GET, FEATURES_SET = 11, 12
COMPACT_BITSETS = 1


class _Message(genlmsg):
    """A message whose first attribute names the netdev. pyroute2 numbers attributes by their position in ``nla_map``."""

    nla_map: Any
    device: Any = ethtoolheader
    bitset: Any = ethtoolbitset


def _attributes(kind: str, *names: str) -> tuple[tuple[str, str], ...]:
    return (("unspec", "none"), ("header", "device"), *((name, kind) for name in names))


class _Features(_Message):
    nla_map = _attributes("bitset", "hw", "wanted", "active", "nochange")


class _Rings(_Message):
    nla_map = _attributes(
        "uint32", "rx_max", "rx_mini_max", "rx_jumbo_max", "tx_max", "rx", "rx_mini", "rx_jumbo", "tx"
    )


class _Channels(_Message):
    nla_map = _attributes("uint32", "rx_max", "tx_max", "other_max", "combined_max", "rx", "tx", "other", "combined")


class _Coalesce(_Message):
    nla_map = (
        *_attributes(
            "uint32",
            *("rx_usecs", "rx_frames", "rx_usecs_irq", "rx_frames_irq"),
            *("tx_usecs", "tx_frames", "tx_usecs_irq", "tx_frames_irq", "stats_block_usecs"),
        ),
        ("adaptive_rx", "uint8"),
        ("adaptive_tx", "uint8"),
    )


@frozen
class _Of:
    """The messages of a group of settings: their class, the commands that read and set it, and the settings' names."""

    message: type[_Message]
    get: int
    set: int
    names: tuple[str, ...]


GROUPS: Mapping[Group, _Of] = {
    "channels": _Of(_Channels, 17, 18, ("rx", "tx", "combined")),
    "rings": _Of(_Rings, 15, 16, ("rx", "tx")),
    "coalescing": _Of(
        _Coalesce, 19, 20, ("rx_usecs", "rx_frames", "tx_usecs", "tx_frames", "adaptive_rx", "adaptive_tx")
    ),
}
SWITCHES = ("adaptive_rx", "adaptive_tx")


class LinuxEthtool:
    """ethtool over netlink, for one thread. The socket is opened with the first request."""

    def __init__(self) -> None:
        self._socket: Any = None
        self._names: dict[int, str] = {}

    def settings(self, group: Group, ifindex: int) -> Mapping[str, Setting]:
        """Read the group. The kernel leaves out what the driver does not support."""
        if group == "features":
            return self._features(ifindex)
        of = GROUPS[group]
        reply = self._get(of.message, of.get, ifindex)
        if group == "coalescing":
            present = {name: reply[name] for name in of.names if name in reply}
            return {name: Setting(bool(value) if name in SWITCHES else value) for name, value in present.items()}
        # A number that the device cannot have has no maximum.
        most = {name: reply[f"{name}_max"] for name in of.names if f"{name}_max" in reply}
        return {name: Setting(reply[name], maximum) for name, maximum in most.items()}

    def set(self, group: Group, ifindex: int, given: Mapping[str, int | bool]) -> None:
        """Set values of the group in one request; features one by one."""
        if group == "features":
            for name, on in given.items():
                self._set_feature(ifindex, name, bool(on))
            return
        # For some unsupported values the kernel answers EINVAL, as for an invalid one.
        if unsupported := sorted(given.keys() - self.settings(group, ifindex).keys()):
            raise OSError(errno.EOPNOTSUPP, f"the driver has no {', '.join(unsupported)} among its {group}")
        values = [(name, int(value)) for name, value in given.items()]
        self._ask(GROUPS[group].message, GROUPS[group].set, ifindex, values, NLM_F_REQUEST | NLM_F_ACK)

    def firmware(self, netdev: str) -> str | None:
        """Use the ioctl SIOCETHTOOL, since ethtool's netlink family has no such message."""
        return ethtool_ioctl.firmware(netdev)

    def _features(self, ifindex: int) -> Mapping[str, Setting]:
        """Read the features (ETHTOOL_MSG_FEATURES_GET) as bits: parsing their names takes ten times as long."""
        if not self._names:
            self._names = _names(self._get(_Features, FEATURES_GET, ifindex))
        reply = self._get(_Features, FEATURES_GET, ifindex, COMPACT_BITSETS)
        if not reply:
            return {}
        fixed = ~_bits(reply["hw"]) | _bits(reply["nochange"])
        on, requested = _bits(reply["active"]), _bits(reply["wanted"])
        return {
            name: Setting(bool(on >> bit & 1), requested=bool(requested >> bit & 1), changeable=not fixed >> bit & 1)
            for bit, name in self._names.items()
        }

    def _set_feature(self, ifindex: int, name: str, on: bool) -> None:
        """Request a feature (ETHTOOL_MSG_FEATURES_SET). The kernel ignores a request for a fixed one without an error."""
        feature = self._features(ifindex).get(name)
        if feature is not None and not feature.changeable:
            raise OSError(errno.EOPNOTSUPP, f"{name} is fixed: neither the driver nor the kernel lets it be changed")
        bit = [("ETHTOOL_A_BITSET_BIT_NAME", name), *([("ETHTOOL_A_BITSET_BIT_VALUE", True)] if on else [])]
        bits = {"attrs": [("ETHTOOL_A_BITSET_BITS_BIT", {"attrs": bit})]}
        wanted = ("wanted", {"attrs": [("ETHTOOL_A_BITSET_BITS", bits)]})
        # The kernel answers with the result, so no acknowledgement is needed.
        self._ask(_Features, FEATURES_SET, ifindex, [wanted], NLM_F_REQUEST)

    def _get(self, kind: type[_Message], command: int, ifindex: int, header_flags: int = 0) -> dict[str, Any]:
        with ignoring(errno.EOPNOTSUPP):
            (answer,) = self._ask(kind, command, ifindex, [], NLM_F_REQUEST, header_flags)
            return {attribute[0]: attribute[1] for attribute in answer["attrs"]}
        return {}

    def _ask(
        self, kind: type[_Message], command: int, ifindex: int, given: list[Any], flags: int, header_flags: int = 0
    ) -> list[Any]:
        message: Any = kind()
        message["cmd"], message["version"] = command, ETHTOOL_GENL_VERSION
        header = [("ETHTOOL_A_HEADER_DEV_INDEX", ifindex), ("ETHTOOL_A_HEADER_FLAGS", header_flags)]
        message["attrs"] = [("header", {"attrs": header}), *given]
        try:
            socket = self._open()
            # All messages of a family have one type, and pyroute2 decodes all messages of a type by one class.
            socket.asyncore.marshal.msg_map[socket.prid] = kind
            return list(socket.nlm_request(message, msg_type=socket.prid, msg_flags=flags))
        except NetlinkError as error:
            raise OSError(error.code, f"ethtool: {error.args[1]}") from error

    def _open(self) -> Any:
        if self._socket is None:
            opened = generic(ETHTOOL_GENL_NAME)
            if opened is None:
                raise OSError(errno.EOPNOTSUPP, "this kernel's ethtool has no netlink (Linux 5.6 has)")
            close_with(self, opened)
            self._socket = opened
        return self._socket


def _names(features: Mapping[str, Any]) -> dict[int, str]:
    """The name of every feature, by its bit. The set of changeable features lists all of them, since it has a mask."""
    listed = features["hw"].get_attr("ETHTOOL_A_BITSET_BITS") if features else None
    bits = listed.get_attrs("ETHTOOL_A_BITSET_BITS_BIT") if listed else ()
    named = ((bit.get_attr("ETHTOOL_A_BITSET_BIT_INDEX"), bit.get_attr("ETHTOOL_A_BITSET_BIT_NAME")) for bit in bits)
    return {index: name for index, name in named if name}


def _bits(bitset: Any) -> int:
    """A compact set: 32-bit words, the lowest first, each in the machine's byte order."""
    words = bytes.fromhex(bitset.get_attr("ETHTOOL_A_BITSET_VALUE").replace(":", ""))
    return sum(word << 32 * number for number, (word,) in enumerate(struct.iter_unpack("=I", words)))
