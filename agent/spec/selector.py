"""Selects the physical functions of an entry of ``nics``: exactly one, or with ``each`` all that match."""

from __future__ import annotations

import re

from attrs import evolve, field, fields, frozen

from agent.spec.strict import NOT_PLAIN
from agent.spec.validators import Each, Matches, Within, unicast_mac

# A bus has 32 devices, a device 8 functions. The kernel writes a domain with four digits or, above ffff, with more: those of
# devices behind Intel VMD begin at 10000 (vmd_find_free_domain, drivers/pci/controller/vmd.c).
PCI_ADDRESS = re.compile(r"(?:[0-9a-f]{4}|[1-9a-f][0-9a-f]{4,7}):[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
PCI_ID = re.compile(r"[0-9a-f]{4}")
NIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,126}")
# What dev_valid_name() takes (net/core/dev.c), in at most ALTIFNAMSIZ - 1 bytes.
ALTNAME = re.compile(rf"[^ /:.{NOT_PLAIN}][^ /:{NOT_PLAIN}]{{0,126}}")
WORDS = re.compile(rf"[^ {NOT_PLAIN}]+( [^ {NOT_PLAIN}]+)*")

MOST_NICS = 64
"""The most NICs of one entry with ``each``."""

INDEX = "{index}"
"""Stands for a NIC's number in the names of an entry with ``each``."""


def name_of(name: str, index: int) -> str:
    """The name of NIC ``index`` of an entry with ``each``, from the name's pattern."""
    return name.replace(INDEX, str(index))


def _is_altname(name: str) -> None:
    if len(name.encode(errors="surrogatepass")) > 127:
        raise ValueError(f"{name!r} has more than 127 bytes; give a shorter one")


def _is_one_netdev(name: str) -> None:
    _is_altname(name)
    if any(sign in name for sign in "*?["):
        raise ValueError(f"{name!r} is a pattern; give one name, or select by other keys with each")


netdev_name = Matches(ALTNAME, "give up to 127 bytes, no white space, '/' or ':', and no dot in front", _is_altname)
_netdev = evolve(netdev_name, check=_is_one_netdev)
nic_name = Matches(NIC_NAME, "use letters, digits, '-', '_' and '.'")

pci_address = Matches(PCI_ADDRESS, "write it as 0000:3b:00.0, in lower case")

_PCI_ID = Matches(PCI_ID, "give the four hexadecimal digits that `lspci -n` prints, such as 15b3")
_NICS = Within(1, MOST_NICS, "NICs")

UNIQUE_KEYS = ("pci", "mac", "netdev")
"""The keys whose values no two functions share."""

WITH_EACH = ("min", "max", "without")
"""The keys that only a selector with ``each`` has."""


@frozen
class Selector:
    """Selects one physical function: exactly one must match all the given keys.

    ``mac`` is the permanent address (IFLA_PERM_ADDRESS), not one that was set later. ``serial`` is the PCI device serial
    number as lspci prints it, or the card's serial number in its Vital Product Data; the ports of one card may share it.

    With ``each`` every function that matches is a NIC of its own, numbered from 0 in the order of their PCI addresses. There
    must be ``min`` (1) to ``max`` (64) of them. The functions of the NICs named in ``without`` do not match.
    """

    pci: str | None = field(default=None, validator=pci_address)
    mac: str | None = field(default=None, validator=unicast_mac)
    netdev: str | None = field(default=None, validator=_netdev)
    vendor: str | None = field(default=None, validator=_PCI_ID)
    device: str | None = field(default=None, validator=_PCI_ID)
    driver: str | None = field(default=None, validator=Matches(WORDS, "give it as `lspci -k` prints it"))
    serial: str | None = field(default=None, validator=Matches(WORDS, "give it as `trackbed inspect` prints it"))
    each: bool = False
    min: int | None = field(default=None, validator=_NICS)
    max: int | None = field(default=None, validator=_NICS)
    without: tuple[str, ...] = field(default=(), validator=Each(nic_name))

    def __attrs_post_init__(self) -> None:
        if not self.keys():
            raise ValueError(f"it selects nothing; give one of {', '.join(KEYS)}")
        for name in UNIQUE_KEYS if self.each else ():
            if getattr(self, name) is not None:
                raise ValueError(f"each and {name}: no two functions have the same {name}; keep one of them")
        for name in () if self.each else WITH_EACH:
            if getattr(self, name) not in (None, ()):
                raise ValueError(f"{name} needs each, which is not given; give it, too, or leave {name} out")
        if self.least > self.most:
            raise ValueError(f"min {self.least} is above max {self.most}; lower it")

    def keys(self) -> dict[str, str]:
        """The keys that a function must match, with their values."""
        return {name: value for name in KEYS if (value := getattr(self, name)) is not None}

    @property
    def least(self) -> int:
        """How many functions must match at least."""
        return self.min or 1

    @property
    def most(self) -> int:
        """How many functions may match."""
        return (self.max or MOST_NICS) if self.each else 1

    def of_one(self, pci: str | None) -> Selector:
        """A selector with the same keys for one function; ``pci``: its address, if it is known."""
        return evolve(self, pci=pci, each=False, min=None, max=None, without=())

    def __str__(self) -> str:
        given = [f"{name}={value}" for name, value in self.keys().items()]
        bounds = ((name, getattr(self, name)) for name in ("min", "max"))
        given += ["each"] if self.each else []
        given += [f"{name}={value}" for name, value in bounds if value is not None]
        given += [f"without {' and '.join(self.without)}"] if self.without else []
        return ", ".join(given)


KEYS = tuple(f.name for f in fields(Selector) if f.name not in ("each", *WITH_EACH))
"""The keys that a function is compared with."""
