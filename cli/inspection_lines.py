"""The lines of `trackbed inspect`: facts in columns, and those of an RDMA device."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from agent.hardware.rdma import CHAR_DEVICES, Gid, RdmaDevice, RdmaPort


def wrapped(indent: str, label: str, facts: Iterable[str], width: int, column: int | None = None) -> list[str]:
    """A label and its facts, two spaces apart. Further lines start below the first fact, and each fact is on one line."""
    first = indent + (f"{label:<8} " if label or column else "")
    # Non-breaking spaces keep a fact in one piece.
    text = "  ".join(fact.replace(" ", "\xa0") for fact in facts)
    wrapped = textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\xa0", " ") for line in wrapped]


def rdma_lines(device: RdmaDevice, indent: str, width: int) -> list[str]:
    """An RDMA device with its ports and GIDs."""
    facts = [device.name, device.transport or "", f"node GUID {device.node_guid}" if device.node_guid else ""]
    facts += [f"system image GUID {device.sys_image_guid}"] if device.sys_image_guid else []
    facts += [f"hardware revision {device.hw_rev}"] if device.hw_rev else []
    facts += [f"board {device.board_id}"] if device.board_id else []
    facts += [each.name if each.present else f"{each.name} (not in {CHAR_DEVICES})" for each in device.char_devices]
    lines = wrapped(indent, "rdma", filter(None, facts), width)
    for port in device.ports:
        state = "/".join(filter(None, (port.state, port.physical_state)))
        netdev = f"{port.netdev} ({', '.join(port.bonded)})" if port.bonded else port.netdev or "no netdev"
        facts = [f"port {port.number}", state, port.link_layer or "", port.rate or "", netdev]
        lines += wrapped(indent, "", filter(None, facts), width, column=8)
        lines += wrapped(indent, "", _subnet_facts(port), width, column=8)
        lines += wrapped(indent, "", _gid_facts(port.gids), width, column=8)
    return lines


def _subnet_facts(port: RdmaPort) -> list[str]:
    """What a subnet manager gave the port; Ethernet has none, and all of it is 0 there."""
    if port.link_layer != "InfiniBand":
        return []
    given = (("LID", port.lid), ("LMC", port.lmc), ("SM LID", port.sm_lid))
    keys = [f"P_Keys {' '.join(f'{key:#06x}' for key in port.pkeys)}"] if port.pkeys else []
    return [f"{name} {value}" for name, value in given if value is not None] + keys


def _gid_facts(gids: tuple[Gid, ...]) -> list[str]:
    """The GIDs that connections use: those of RoCE v2, else the first one."""
    return [f"GID {gid.index} {gid.type} {gid.address}" for gid in gids if gid.type == "RoCE v2"] or [
        f"GID {gid.index} {gid.type} {gid.address}" for gid in gids[:1] if gid.type
    ]
