"""Which network manager configures a netdev, by the files in which each keeps it: nothing else may give that netdev addresses.

systemd-networkd: /run/systemd/netif/links/IFINDEX (networkd-link.c, link_save). NetworkManager, from its source and not run:
/run/NetworkManager/devices/IFINDEX (nm-config.c, nm_config_device_state_write). netplan writes the configuration of one of
these two. ifupdown: `agent.hardware.ifupdown`. At boot the agent may start before them, so it waits for a manager
that is to start. A member of a bond or a bridge has no address of its own: that is the bond's. A VRF leaves its members their
addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase

from attrs import frozen

from agent.hardware import ifupdown
from agent.hardware.bonds import master, vrf
from agent.hardware.sysfs import names_in, read_or
from agent.machine import Files, Link

NETWORKD_LINKS = "/run/systemd/netif/links"
# Made when NetworkManager first starts in a boot (nm_main_utils_ensure_rundir).
NM_DEVICES = "/run/NetworkManager/devices"
NM_PROFILES = "/run/NetworkManager/system-connections"

UNIT_FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
GENERATED = ("/run/systemd/generator", "/run/systemd/generator.early", "/run/systemd/generator.late")
# ifupdown2's unit is wanted by basic.target.
WANTS = ("multi-user.target.wants", "basic.target.wants")


@frozen
class Claim:
    """Who configures a netdev, and what to do about that. ``undecided``: a manager will start, or has not looked at it yet."""

    who: str
    remedy: str
    undecided: bool = False


def claim(files: Files, link: Link) -> Claim | None:
    """Who configures the netdev; None if nobody does."""
    claims = (
        _master(files, link),
        _networkd(files, link.ifindex, link.name),
        _network_manager(files, link),
        _ifupdown(files, link.name),
    )
    # A manager that is known to configure the netdev is named rather than one that only may.
    return min((each for each in claims if each is not None), key=lambda each: each.undecided, default=None)


def _master(files: Files, link: Link) -> Claim | None:
    name, upper = link.name, master(files, link.name)
    if upper is None or upper == vrf(files, link):
        return None
    # A VF cannot leave a master that is a netvsc netdev (Azure).
    return Claim(f"{name} is a member of {upper}", f"leave the addresses to {upper}, or take {name} out of it")


def _networkd(files: Files, ifindex: int, name: str) -> Claim | None:
    state = dict(_settings(files, f"{NETWORKD_LINKS}/{ifindex}"))
    runs = _enabled(files, "systemd-networkd.service") or names_in(files, NETWORKD_LINKS)
    admin = state.get("ADMIN_STATE", "pending" if runs else "unmanaged")
    if admin == "unmanaged":
        return None
    if admin in ("pending", "initialized"):
        remedy = "wait, or see `systemctl status systemd-networkd`; if nothing needs it, disable it"
        return Claim(f"systemd-networkd has not decided yet whether it configures {name}", remedy, undecided=True)
    file = state.get("NETWORK_FILE", "")
    if "netplan" in file:
        return Claim(
            f"netplan configures {name}, by systemd-networkd ({file})",
            f"take {name} out of /etc/netplan and run `netplan apply`",
        )
    return Claim(
        f"systemd-networkd configures {name} ({file or 'no file'})",
        f"have no .network file match {name}, or one with `Unmanaged=yes` under [Link], and run `networkctl reload`",
    )


def _network_manager(files: Files, link: Link) -> Claim | None:
    name, state = link.name, dict(_settings(files, f"{NM_DEVICES}/{link.ifindex}"))
    if state.get("managed") == "true":
        if (profile := _netplan_profile(files, link, state.get("connection-uuid"))) is not None:
            return Claim(
                f"netplan configures {name}, by NetworkManager ({NM_PROFILES}/{profile})",
                f"take {name} out of /etc/netplan and run `netplan apply`",
            )
        return Claim(
            f"NetworkManager configures {name}",
            f"run `nmcli device set {name} managed no`, and for later boots put `unmanaged-devices=interface-name:{name}` "
            "under [keyfile] in a file of /etc/NetworkManager/conf.d",
        )
    started = "devices" in names_in(files, NM_DEVICES.rpartition("/")[0])
    if started or not _enabled(files, "NetworkManager.service"):
        return None
    remedy = "wait, or see `systemctl status NetworkManager`; if nothing needs it, disable it"
    return Claim(f"NetworkManager has not started yet and may configure {name}", remedy, undecided=True)


def _netplan_profile(files: Files, link: Link, uuid: str | None) -> str | None:
    """The file that netplan has written for the netdev: it is called by netplan's ID, which need not be the netdev's name.

    netplan writes a name, a pattern of names, a permanent address or a UUID (write_nm_conf_access_point, src/nm.c).
    """
    for file in names_in(files, NM_PROFILES):
        profile = dict(_settings(files, f"{NM_PROFILES}/{file}")) if file.startswith("netplan-") else {}
        named = any(fnmatchcase(link.name, each) for each in profile.get("interface-name", "").split(";"))
        addressed = profile.get("mac-address", "none").lower() in (link.permanent_mac, link.mac)
        if named or addressed or profile.get("uuid", "none") == uuid:
            return file
    return None


def _ifupdown(files: Files, name: str) -> Claim | None:
    up = name in ifupdown.up(files)
    if not up and not _enabled(files, "networking.service"):
        return None
    methods = [(place, method) for place, netdev, method in ifupdown.stanzas(files) if netdev == name]
    # `manual` leaves the configuration to others.
    place = next(
        (place for place, method in methods if method != "manual"), "" if methods or not up else ifupdown.STATE
    )
    if not place:
        return None
    return Claim(
        f"ifupdown configures {name} ({place})",
        f"run `ifdown {name}`, and take its stanza out of {ifupdown.INTERFACES}",
    )


def _settings(files: Files, path: str) -> Iterator[tuple[str, str]]:
    for line in read_or(files, path, "").splitlines():
        key, separator, value = line.partition("=")
        if separator:
            yield key.strip(), value.strip()


def _enabled(files: Files, unit: str) -> bool:
    """Whether systemd starts a unit at boot: a target of the boot wants it, and it is not masked (a link to /dev/null)."""
    for folder in UNIT_FOLDERS:
        with suppress(OSError):
            if files.target(f"{folder}/{unit}") == "null":
                return False
    wants = (f"{folder}/{each}" for folder in (*UNIT_FOLDERS, *GENERATED) for each in WANTS)
    return any(unit in names_in(files, each) for each in wants)
