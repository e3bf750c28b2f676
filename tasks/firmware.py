"""Sets firmware parameters of Mellanox NICs that SR-IOV and RDMA depend on, by mstconfig of the distribution's mstflint.

Only cards in the inventory are touched. New values take effect at the next boot, which is requested. Written from vendor
documents (the parameters of mlxconfig) and public issues (the output of `mstconfig -e query`); not run on ConnectX.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from attrs import Attribute, field, frozen
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.spec.selector import pci_address
from agent.spec.validators import Within
from tasks import packages, reboot
from tasks.common.commands import Commands, refuse
from tasks.common.data import Key, record
from tasks.common.facts import FactBase

TASK = "firmware"
PACKAGE = "mstflint"
LINK_TYPES = {"IB": 1, "ETH": 2}


def _two_at_most(_: object, attribute: Attribute[Any], value: tuple[object, ...]) -> None:
    if len(value) > 2:
        raise ValueError(f"{attribute.name}: a card has at most two ports; give one type for each port, in order")


@frozen
class NicFirmware:
    """The wanted firmware parameters of one card. ``pci``: the address of any of its functions.

    ``sriov``: SRIOV_EN. ``vfs``: NUM_OF_VFS of each port. ``link_types``: LINK_TYPE_P1 and LINK_TYPE_P2. A parameter that is
    not given is left alone.
    """

    pci: str = field(validator=pci_address)
    sriov: bool | None = None
    vfs: int | None = field(default=None, validator=Within(0, 1024, "VFs"))
    link_types: tuple[Literal["IB", "ETH"], ...] = field(default=(), validator=_two_at_most)

    def __attrs_post_init__(self) -> None:
        if self.vfs and self.sriov is False:
            raise ValueError("vfs: there are none if sriov is False; remove one of the two")

    def parameters(self) -> dict[str, int]:
        """The wanted values by the firmware's names."""
        wanted: dict[str, int] = {}
        sriov = True if self.sriov is None and self.vfs else self.sriov
        if sriov is not None:
            wanted["SRIOV_EN"] = int(sriov)
        if self.vfs is not None:
            wanted["NUM_OF_VFS"] = self.vfs
        return wanted | {f"LINK_TYPE_P{port}": LINK_TYPES[kind] for port, kind in enumerate(self.link_types, 1)}


def _once(_: object, attribute: Attribute[Any], value: tuple[NicFirmware, ...]) -> None:
    cards = [nic.pci.partition(".")[0] for nic in value]
    if duplicates := sorted({card for card in cards if cards.count(card) > 1}):
        raise ValueError(
            f"{attribute.name}: {', '.join(duplicates)} is given twice; give each card once, by one function"
        )


@frozen
class Firmware:
    """The cards to configure."""

    nics: tuple[NicFirmware, ...] = field(default=(), validator=_once)


FIRMWARE = Key("firmware", Firmware(), record(Firmware))


@frozen
class Setting:
    """A parameter's value in this boot, and in the next."""

    current: int
    following: int


@frozen
class Card:
    """A card's parameters; ``error``: why mstconfig cannot read them."""

    settings: dict[str, Setting] = field(factory=dict)
    error: str = ""


_QUERY = """
for pci; do
  echo "card $pci"
  if ! command -v mstconfig >/dev/null; then echo "error mstconfig is not installed"; continue; fi
  if output=$(mstconfig -e -d "$pci" query 2>&1); then
    printf '%s\\n' "$output" | sed 's/^/line /'
  else
    printf '%s\\n' "$output" | grep . | tail -n 1 | sed 's/^/error /'
  fi
done
"""

# *       NUM_OF_VFS          0         0         4
#  RO     SRIOV_EN            False(0)  False(0)  False(0)     (RO: the parameter is locked)
_LINE = re.compile(r"line \*?\s*(?:RO\s+)?([A-Z0-9_]+)\s+\S+\s+(\S+)\s+(\S+)\s*")


class FirmwareSettings(FactBase[dict[str, Card]]):
    """The parameters of cards, by PCI address."""

    default = dict

    def command(self, addresses: tuple[str, ...]) -> StringCommand:
        """Print default, current and next values by `mstconfig query`."""
        return self.script(_QUERY, *addresses)

    def process(self, output: list[str]) -> dict[str, Card]:
        """Parse the numeric parameters; others, such as arrays, are ignored."""
        cards: dict[str, tuple[dict[str, Setting], list[str]]] = {}
        settings: dict[str, Setting] = {}
        errors: list[str] = []
        for line in output:
            word, _, text = line.partition(" ")
            if word == "card":
                settings, errors = cards[text] = ({}, [])
            elif word == "error":
                errors.append(text)
            elif (columns := _LINE.fullmatch(line)) and None not in (
                values := (_number(columns[2]), _number(columns[3]))
            ):
                settings[columns[1]] = Setting(*(value or 0 for value in values))
        return {address: Card(settings, " ".join(errors)) for address, (settings, errors) in cards.items()}


def _number(text: str) -> int | None:
    digits = re.fullmatch(r"(?:.*\()?(\d+)\)?", text)
    return int(digits[1]) if digits else None


@deploy("Firmware")
def configure() -> None:
    """Set the parameters and request a reboot for them; without the key, only withdraw an earlier request."""
    nics = FIRMWARE.here().nics
    if nics:
        packages.present(name=PACKAGE, names=(PACKAGE,), family=packages.system().family)
    write(name="Settings", nics=nics)


@operation()
def write(nics: tuple[NicFirmware, ...]) -> Commands:
    """Write the parameters whose value for the next boot differs. Request a reboot while a card runs with other values."""
    cards = host.get_fact(FirmwareSettings, addresses=tuple(nic.pci for nic in nics)) if nics else {}
    differs = []
    for nic in nics:
        card, wanted = cards.get(nic.pci, Card(error="mstconfig printed nothing")), nic.parameters()
        missing = [name for name in wanted if name not in card.settings]
        # In pyinfra's prepare phase mstflint may not be installed yet.
        if missing and (host.state.is_executing or not card.error):
            yield refuse(_explain(nic.pci, card, missing))
            return
        if changes := [
            f"{name}={value}" for name, value in wanted.items() if missing or card.settings[name].following != value
        ]:
            yield StringCommand("mstconfig", "-y", "-d", QuoteString(nic.pci), "set", *map(QuoteString, changes))
        differs += [
            f"{nic.pci} {name} is {card.settings[name].current}, not {value}"
            for name, value in wanted.items()
            if name not in missing and card.settings[name].current != value
        ]
    yield from reboot.request(TASK, "; ".join(differs)) if differs else reboot.withdraw(TASK)


def _explain(address: str, card: Card, missing: list[str]) -> str:
    if card.error:
        return (
            f"firmware: mstconfig cannot read {address}: {card.error}; "
            "check that it is a Mellanox NIC's address (lspci -D -d 15b3:), and that Secure Boot does not lock the kernel down"
        )
    return (
        f"firmware: {address} does not have {', '.join(missing)}; remove it (`mstconfig -d {address} query` lists all)"
    )
