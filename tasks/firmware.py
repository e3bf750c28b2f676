"""Settings in the firmware of Mellanox NICs that SR-IOV and RDMA depend on, by mstconfig of the distribution's mstflint.

From vendor documents (the parameters of mlxconfig; the output of `mstconfig -e query` as quoted in public issues): not run on
ConnectX. Only what the inventory names is looked at. It takes effect at the next boot, which is wished for until then.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from attrs import Attribute, field, frozen
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.spec.nic import PCI_ADDRESS
from agent.spec.validators import Matches, Within
from tasks import packages, reboot
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, record

TASK = "firmware"
PACKAGE = "mstflint"
LINK_TYPES = {"IB": 1, "ETH": 2}


def _some(_: object, attribute: Attribute[Any], value: tuple[object, ...]) -> None:
    if len(value) > 2:
        raise ValueError(f"{attribute.name}: a card has two ports at most; give one for each, in their order")


@frozen
class NicFirmware:
    """What one card shall have: a card, not a port; any of its functions leads to it.

    ``sriov``: SRIOV_EN. ``vfs``: NUM_OF_VFS, of each port. ``link_types``: LINK_TYPE_P1 and _P2. Not given: left alone.
    """

    pci: str = field(validator=Matches(PCI_ADDRESS, "write it as 0000:3b:00.0"))
    sriov: bool | None = None
    vfs: int | None = field(default=None, validator=Within(0, 1024, "VFs"))
    link_types: tuple[Literal["IB", "ETH"], ...] = field(default=(), validator=_some)

    def __attrs_post_init__(self) -> None:
        if self.vfs and self.sriov is False:
            raise ValueError("vfs: there are none without sriov; give one of the two")

    def parameters(self) -> dict[str, int]:
        """By the firmware's names."""
        wanted: dict[str, int] = {}
        sriov = True if self.sriov is None and self.vfs else self.sriov
        if sriov is not None:
            wanted["SRIOV_EN"] = int(sriov)
        if self.vfs is not None:
            wanted["NUM_OF_VFS"] = self.vfs
        return wanted | {f"LINK_TYPE_P{port}": LINK_TYPES[kind] for port, kind in enumerate(self.link_types, 1)}


def _once(_: object, attribute: Attribute[Any], value: tuple[NicFirmware, ...]) -> None:
    cards = [nic.pci.partition(".")[0] for nic in value]
    if doubled := sorted({card for card in cards if cards.count(card) > 1}):
        raise ValueError(f"{attribute.name}: {', '.join(doubled)} is given twice; give each card once, by one function")


@frozen
class Firmware:
    """The cards whose settings are given."""

    nics: tuple[NicFirmware, ...] = field(default=(), validator=_once)


FIRMWARE = Key("firmware", Firmware(), record(Firmware))
KEYS = (FIRMWARE,)


@frozen
class Setting:
    """A parameter's number: of this boot, and of the next."""

    current: int
    following: int


@frozen
class Card:
    """What mstconfig says of a card; ``error``: why it says nothing."""

    settings: dict[str, Setting] = field(factory=dict)
    error: str = ""


_QUERY = """
for pci; do
  echo "card $pci"
  if ! command -v mstconfig >/dev/null; then echo "error mstconfig is not installed"; continue; fi
  if said=$(mstconfig -e -d "$pci" query 2>&1); then
    printf '%s\\n' "$said" | sed 's/^/line /'
  else
    printf '%s\\n' "$said" | grep . | tail -n 1 | sed 's/^/error /'
  fi
done
"""

# *       NUM_OF_VFS          0         0         4
#  RO     SRIOV_EN            False(0)  False(0)  False(0)     (read-only: somebody has locked it)
_LINE = re.compile(r"line \*?\s*(?:RO\s+)?([A-Z0-9_]+)\s+\S+\s+(\S+)\s+(\S+)\s*")


class Settings(FactBase[dict[str, Card]]):
    """The settings of cards, by the PCI addresses that are asked for."""

    default = dict

    def command(self, addresses: tuple[str, ...]) -> StringCommand:
        """`mstconfig query` with default, current and next values."""
        return script(_QUERY, *addresses)

    def process(self, output: list[str]) -> dict[str, Card]:
        """Parameters that are no numbers, such as arrays, are left out."""
        cards: dict[str, tuple[dict[str, Setting], list[str]]] = {}
        for line in output:
            what, _, text = line.partition(" ")
            if what == "card":
                settings, errors = cards[text] = ({}, [])
            elif what == "error":
                errors.append(text)
            elif (found := _LINE.fullmatch(line)) and None not in (values := (_number(found[2]), _number(found[3]))):
                settings[found[1]] = Setting(*(value or 0 for value in values))
        return {address: Card(settings, " ".join(errors)) for address, (settings, errors) in cards.items()}


def _number(text: str) -> int | None:
    found = re.fullmatch(r"(?:.*\()?(\d+)\)?", text)
    return int(found[1]) if found else None


@deploy("Firmware")
def configure() -> None:
    """Set what the inventory gives and wish for a boot; without the key a wish of ours is withdrawn."""
    nics = FIRMWARE.here().nics
    if nics:
        packages.present(name=PACKAGE, names=(PACKAGE,), family=packages.system().family)
    write(name="Settings", nics=nics)
    wish(name="Settings of this boot", nics=nics)


@operation()
def write(nics: tuple[NicFirmware, ...]) -> Commands:
    """Write the parameters that the next boot would not have."""
    found = host.get_fact(Settings, addresses=tuple(nic.pci for nic in nics)) if nics else {}
    for nic in nics:
        card, wanted = found.get(nic.pci, Card(error="mstconfig did not answer")), nic.parameters()
        lacking = [name for name in wanted if name not in card.settings]
        # Before it executes, mstflint may not be there yet.
        if lacking and (host.state.is_executing or not card.error):
            yield refuse(_why(nic.pci, card, lacking))
            return
        if changes := [
            f"{name}={value}" for name, value in wanted.items() if lacking or card.settings[name].following != value
        ]:
            yield StringCommand("mstconfig", "-y", "-d", QuoteString(nic.pci), "set", *map(QuoteString, changes))


def _why(address: str, card: Card, lacking: list[str]) -> str:
    if card.error:
        return (
            f"firmware: mstconfig cannot read {address}: {card.error}; "
            "is it a Mellanox NIC's PCI address (lspci -D -d 15b3:), and is the kernel not locked down (Secure Boot)?"
        )
    return f"firmware: {address} has no {', '.join(lacking)}; leave it out, or look for its name: mstconfig -d {address} query"


@operation()
def wish(nics: tuple[NicFirmware, ...]) -> Commands:
    """Wish for a reboot while a card runs with other values than those that are wanted."""
    found = host.get_fact(Settings, addresses=tuple(nic.pci for nic in nics)) if nics else {}
    differs = [
        f"{nic.pci} {name} is {now.current}, not {value}"
        for nic in nics
        for name, value in nic.parameters().items()
        if (now := found.get(nic.pci, Card()).settings.get(name)) is not None and now.current != value
    ]
    if differs:
        yield from reboot.record(TASK, "; ".join(differs))
    else:
        yield from reboot.withdraw(TASK)
