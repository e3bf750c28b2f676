"""The results of a fabric test for the node's NICs. The deploy writes them to the node, and a probe judges by them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import cattrs
from attrs import field, frozen

from agent.documents import load
from agent.report.names import STATE_FOLDER

PROOF = f"{STATE_FOLDER}/fabric.json"

LARGEST = 1 << 20
"""Bytes. A node with 64 NICs has 20,000."""


@frozen
class Seen:
    """A NIC's result. ``pci``: the function with the RDMA device ``device``. ``message``: why the NIC is not good."""

    nic: str
    pci: str
    device: str
    good: bool
    message: str = ""
    identity: Mapping[str, str] = field(factory=dict)


@frozen
class Proof:
    """``time``: when the test ended, in seconds since the epoch."""

    time: float
    nics: tuple[Seen, ...] = ()


def identity(
    driver: str | None,
    version: str | None,
    firmware: str | None,
    guid: str | None,
    link_layer: str | None,
    rate: str | None,
) -> dict[str, str]:
    """Identifies what was tested: a result does not count for another driver, firmware or port.

    :param version: the driver's srcversion, or the kernel's release where it has none.
    :param guid: the node GUID of the RDMA device.
    """
    return {
        "driver": f"{driver or ''} {version or ''}".strip(),
        "firmware": firmware or "",
        "port": " ".join(filter(None, (guid, link_layer, rate))),
    }


_converter = cattrs.Converter()


def proof_to_json(proof: Proof) -> str:
    """The text of the file."""
    return json.dumps(_converter.unstructure(proof), indent=2) + "\n"


def proof_from_json(text: str) -> Proof:
    """Parse the file.

    :raises ValueError: it is no such file.
    """
    try:
        return _converter.structure(load(text, LARGEST), Proof)
    except Exception as error:  # cattrs raises exception groups
        raise ValueError(f"{PROOF} cannot be read: {error!r}") from None
