"""All kernel I/O: the machine of ``machine.py`` on a real Linux."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import sys
from array import array
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from pyroute2.iproute.linux import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from agent import verbs
from agent.machine import Link, Machine, PortMtus, RdmaPortKey, VfInfo

IFF_UP = 1
RTEXT_FILTER_VF = 1
RT_TABLE_LOCAL = 255

# include/uapi/linux/sockios.h and ethtool.h: struct ethtool_drvinfo is cmd, driver[32], version[32], fw_version[32], ...
SIOCETHTOOL = 0x8946
ETHTOOL_GDRVINFO = 0x3
DRVINFO_SIZE = 196
DRVINFO_FIRMWARE = slice(68, 100)


class LinuxFiles:
    """Files by their real paths."""

    def read(self, path: str) -> str:
        """Read a file of unknown size."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            chunks = []
            while chunk := os.read(descriptor, 1 << 16):
                chunks.append(chunk)
        finally:
            os.close(descriptor)
        return b"".join(chunks).decode(errors="replace").rstrip()

    def write(self, path: str, text: str) -> None:
        """Write in one call, to a file that is there."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def names(self, path: str) -> list[str]:
        """List a directory."""
        return sorted(os.listdir(path))  # noqa: PTH208  Path objects cost three times as much, thousands of times a pass

    def target(self, path: str) -> str:
        """Read a link."""
        return os.readlink(path).rpartition("/")[2]  # noqa: PTH115  as above


@contextmanager
def _as_oserror(what: str) -> Iterator[None]:
    try:
        yield
    except NetlinkError as error:
        raise OSError(error.code, f"{what}: {os.strerror(error.code)}") from error


class LinuxNetlink:
    """rtnetlink through pyroute2; belongs to the thread that makes it."""

    def __init__(self) -> None:
        self._ip: Any = IPRoute()

    def links(self) -> list[Link]:
        """Dump every link."""
        with _as_oserror("dump of links"):
            return [_link(message) for message in self._ip.link("dump")]

    def link(self, name: str) -> Link | None:
        """Ask for one link."""
        try:
            with _as_oserror(f"link {name}"):
                return _link(self._ip.link("get", ifname=name, ext_mask=RTEXT_FILTER_VF)[0])
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def set_link(self, ifindex: int, *, mtu: int | None = None, up: bool | None = None) -> None:
        """Set a link's values."""
        given: dict[str, Any] = {}
        if mtu is not None:
            given["mtu"] = mtu
        if up is not None:
            given["state"] = "up" if up else "down"
        with _as_oserror(f"set {given}"):
            self._ip.link("set", index=ifindex, **given)

    def set_vf(
        self,
        ifindex: int,
        index: int,
        *,
        mac: str | None = None,
        vlan: int | None = None,
        trust: bool | None = None,
        spoofchk: bool | None = None,
    ) -> None:
        """Set a VF's values through its PF."""
        given: dict[str, Any] = {"vf": index}
        for name, value in (("mac", mac), ("vlan", vlan), ("trust", trust), ("spoofchk", spoofchk)):
            if value is not None:
                given[name] = int(value) if isinstance(value, bool) else value
        with _as_oserror(f"set VF {given}"):
            self._ip.link("set", index=ifindex, vf=given)

    def default_route_ifindexes(self) -> frozenset[int]:
        """Dump the routes of both families."""
        found = set()
        with _as_oserror("dump of routes"):
            for family in (2, 10):
                for route in self._ip.get_default_routes(family=family):
                    paths = route.get("multipath") or ()
                    found |= {path["oif"] for path in paths if "oif" in path}
                    if route.get("oif") is not None:
                        found.add(route.get("oif"))
        return frozenset(found)


def _link(message: Any) -> Link:
    properties = message.get("prop_list") or {}
    altnames = properties.get_attrs("IFLA_ALT_IFNAME") if hasattr(properties, "get_attrs") else ()
    mac = message.get("address") or ""
    return Link(
        ifindex=message["index"],
        name=message.get("ifname"),
        mac=mac,
        permanent_mac=message.get("perm_address") or "",
        mtu=message.get("mtu") or 0,
        up=bool(message["flags"] & IFF_UP),
        carrier=bool(message.get("carrier")),
        altnames=tuple(altnames),
        vfs=tuple(_vfs(message)),
    )


def _vfs(message: Any) -> Iterator[VfInfo]:
    listed = message.get("vfinfo_list")
    for entry in listed.get_attrs("IFLA_VF_INFO") if listed else ():
        mac = entry.get_attr("IFLA_VF_MAC")
        trust = entry.get_attr("IFLA_VF_TRUST")
        spoofchk = entry.get_attr("IFLA_VF_SPOOFCHK")
        yield VfInfo(
            index=mac["vf"],
            mac=mac["mac"][:17],
            vlan=entry.get_attr("IFLA_VF_VLAN")["vlan"],
            trust=_told(trust, "trust"),
            spoofchk=_told(spoofchk, "spoofchk"),
        )


def _told(attribute: Any, name: str) -> bool | None:
    # rtnl_fill_vfinfo() presets -1 for what the driver does not fill in.
    if attribute is None or attribute[name] == 0xFFFFFFFF:
        return None
    return bool(attribute[name])


class LinuxProcesses:
    """The processes as psutil sees them."""

    def running(self) -> frozenset[str]:
        """Every process's name."""
        return frozenset(process.info["name"] for process in psutil.process_iter(["name"]))


class LinuxDetails:
    """What drivers and libraries tell only when asked in their own ways."""

    def addresses(self) -> dict[int, tuple[str, ...]]:
        """Dump the addresses of both families (RTM_GETADDR); IFA_LOCAL is our end of a point-to-point link."""
        found: dict[int, list[str]] = {}
        with IPRoute() as ip, _as_oserror("dump of addresses"):
            for message in ip.addr("dump"):
                address = message.get("local") or message.get("address")
                found.setdefault(message["index"], []).append(f"{address}/{message['prefixlen']}")
        return {ifindex: tuple(addresses) for ifindex, addresses in found.items()}

    def firmware(self, netdev: str) -> str | None:
        """Ask by SIOCETHTOOL, since ethtool's netlink has no such message."""
        buffer = array("B", ETHTOOL_GDRVINFO.to_bytes(4, sys.byteorder).ljust(DRVINFO_SIZE, b"\0"))
        request = struct.pack("16sP16x", netdev.encode(), buffer.buffer_info()[0])
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
                fcntl.ioctl(control, SIOCETHTOOL, request)
        except OSError:
            return None
        version = buffer.tobytes()[DRVINFO_FIRMWARE].partition(b"\0")[0].decode(errors="replace").strip()
        return None if version in ("", "N/A") else version

    def vpd(self, address: str) -> bytes:
        """Read sysfs's `vpd`, which ends where the device's end tag is."""
        try:
            return Path(f"/sys/bus/pci/devices/{address}/vpd").read_bytes()
        except OSError:
            return b""

    def port_mtus(self, ports: Collection[RdmaPortKey]) -> PortMtus:
        """Ask libibverbs."""
        return verbs.port_mtus(ports)


def machine() -> Machine:
    """This machine."""
    return Machine(LinuxFiles(), LinuxNetlink(), LinuxProcesses(), LinuxDetails())
