"""The attributes of a VF in its PF's netlink messages: IFLA_VF_INFO of include/uapi/linux/if_link.h.

Which attributes there are, and how each is written and read, is in agent/spec/vf_attributes.
Writes are made by pyroute2's messages. Reads have a decoder of their own, since each pass reads every VF of a PF
(docs/decisions/0022-rtnetlink-reads.md); their numbers are those of pyroute2's tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from agent.linux.messages import attributes, numbers
from agent.machine import VfInfo
from agent.spec.vf_attributes import Together, ordered, word

_VF = numbers(ifinfmsg.vflist.vfinfo)
_READERS = tuple((_VF[each.netlink], each.name, each.read) for each in ordered())
# The kernel reports the MAC of every VF.
_MAC = _VF["IFLA_VF_MAC"]
_INDEX = word(0)


_VLAN_INFO: Any = ifinfmsg.vflist.vfinfo.vf_vlist.ivvi


class VfMessage(ifinfmsg):
    """pyroute2's message for links, with IFLA_VF_VLAN_INFO in its full length.

    struct ifla_vf_vlan_info is padded to 16 bytes; pyroute2 0.9.7 writes 14. Kernels since CVE-2024-36017 (6.10, and 6.1 with
    its fix) answer EINVAL to that. vishvananda/netlink had the same fault (github.com/vishvananda/netlink/issues/1003).
    """

    class vflist(ifinfmsg.vflist):
        """IFLA_VFINFO_LIST."""

        class vfinfo(ifinfmsg.vflist.vfinfo):
            """IFLA_VF_INFO."""

            class vf_vlist(ifinfmsg.vflist.vfinfo.vf_vlist):
                """IFLA_VF_VLAN_LIST."""

                class ivvi(_VLAN_INFO):  # type: ignore[misc]
                    """IFLA_VF_VLAN_INFO."""

                    fields = (*_VLAN_INFO.fields, ("__pad", "2x"))


# pyroute2 compiles the attributes of a message class once, and keeps the result in the class, where a subclass inherits it. So
# after one message of type ifinfmsg, these classes would use its attributes. Compiled here, each keeps its own.
for _class in (VfMessage, VfMessage.vflist, VfMessage.vflist.vfinfo, VfMessage.vflist.vfinfo.vf_vlist):
    _class().compile_nla_table()  # type: ignore[no-untyped-call]


def request(ifindex: int, index: int, given: Mapping[str, Any]) -> Any:
    """The message that sets the ``given`` values of VF ``index`` of the PF whose netdev has ``ifindex``."""
    message: Any = VfMessage()  # type: ignore[no-untyped-call]
    message["index"] = ifindex
    message["attrs"] = [("IFLA_VFINFO_LIST", {"attrs": [("IFLA_VF_INFO", {"attrs": list(_written(index, given))})]})]
    return message


def _written(index: int, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    given = {name: value for name, value in given.items() if value is not None}
    done: list[Together] = []
    for attribute in ordered():
        if attribute.name not in given or attribute.together in done:
            continue
        if (together := attribute.together) is None:
            yield attribute.netlink, {"vf": index, attribute.key: attribute.encode(given[attribute.name])}
        else:
            done.append(together)
            yield together.message(
                index, {name: given.get(name, default) for name, default in together.defaults.items()}
            )


def decode(entry: bytes) -> VfInfo:
    """Decode one IFLA_VF_INFO. Each of its attributes is a struct that begins with the VF's index, or a list of such."""
    content = dict(attributes(entry))
    values = {name: read(content[number]) for number, name, read in _READERS if number in content}
    return VfInfo(_INDEX(content[_MAC]), **values)
