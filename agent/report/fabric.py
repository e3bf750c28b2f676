"""The results of a fabric test for the node's NICs. The deploy writes this file to the node, and a probe judges it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from attrs import field, frozen

from agent.documents import load
from agent.report.names import STATE_FOLDER
from agent.report.records import from_plain, to_plain

RESULTS_FILE = f"{STATE_FOLDER}/fabric.json"

LARGEST = 1 << 20
"""Bytes. A node with 64 NICs has 20,000."""


@frozen
class NicResult:
    """The result of one NIC. ``pci``: the function with the RDMA device ``device``. ``message``: why the NIC is not good.

    ``identity``: what was tested, as :func:`identity` returns it.
    """

    nic: str
    pci: str
    device: str
    good: bool
    message: str = ""
    identity: Mapping[str, str] = field(factory=dict)


@frozen
class FabricResults:
    """The results of one test. ``time``: when it ended, in seconds since the epoch."""

    time: float
    nics: tuple[NicResult, ...] = ()


def identity(
    driver: str | None,
    version: str | None,
    firmware: str | None,
    guid: str | None,
    link_layer: str | None,
    rate: str | None,
) -> dict[str, str]:
    """What identifies a NIC in a test: its result does not count for another driver, firmware or port.

    :param version: the driver's srcversion, or the kernel's release where it has none.
    :param guid: the node GUID of the RDMA device.
    """
    return {
        "driver": f"{driver or ''} {version or ''}".strip(),
        "firmware": firmware or "",
        "port": " ".join(filter(None, (guid, link_layer, rate))),
    }


def results_to_json(results: FabricResults) -> str:
    """The text of the file."""
    return json.dumps(to_plain(results), indent=2) + "\n"


def results_from_json(text: str) -> FabricResults:
    """Parse the file.

    :raises ValueError: it has another format.
    """
    try:
        return from_plain(load(text, LARGEST), FabricResults)
    except ValueError as error:
        raise ValueError(f"{RESULTS_FILE} cannot be read: {error}") from None
