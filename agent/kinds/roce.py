"""RoCE quality of service: trust mode, priority flow control (PFC), congestion notification (ECN), rdma_cm defaults.

PFC and DSCP trust are set over DCBNL, or trust through MLNX_OFED's sysfs file if that exists. ECN and the traffic class exist
only as files of MLNX_OFED. Written from the driver's source and vendor documents, not run on such a NIC; only the rdma_cm
defaults were.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterator, Mapping

from attrs import evolve, field, frozen

from agent.driver_families import family_of
from agent.hardware.functions import NET, RDMA, driver, netdev, netdev_of, pci_of
from agent.hardware.rdma import Reader
from agent.hardware.sysfs import names_in, numbered, read_or, whole
from agent.kinds import Reading, links
from agent.machine import Files, Machine
from agent.report.reasons import LOG_IF_LOADED
from agent.report.records import Change, Disruption, Value
from agent.report.target import is_vf, vf_index
from agent.spec.nic import Roce
from agent.spec.ranges import format_ranges, parse_ranges
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted, WantedNic

NAME = "roce"
AFTER = ("vf_links",)
# LLDP agent daemon: it sets what the switch advertises by DCBX.
OTHER_WRITERS = ("lldpad",)
# How the LLDP agent in a NIC's firmware is switched off. While it runs DCBX these drivers answer EINVAL, without a reason:
# ice_dcbnl_setpfc, i40e_dcbnl_ieee_setpfc, bnxt_dcbnl_ieee_setpfc and their like for applications.
FIRMWARE_LLDP = {
    "ice": "`ethtool --set-priv-flags {} fw-lldp-agent off`; ice also refuses while {} is in a bond",
    "i40e": "`ethtool --set-priv-flags {} disable-fw-lldp on`",
    "bnxt_en": "DCBX off in its firmware, by Broadcom's tool",
}

ON_PORTS = ("cm_tos", "cm_mode", "traffic_class")
# The reaction point slows down on a congestion notification packet from the notification point.
ECN = {"ecn_np": "roce_np", "ecn_rp": "roce_rp"}
NO_PRIORITY = "none"
# By class selector, the default of mlx5's firmware. All DSCPs are listed, since one that is missing would map to priority 0.
DSCP_PRIORITIES = frozenset((dscp, dscp >> 3) for dscp in range(64))


@frozen
class RoceState:
    """Trust, PFC and ECN of a PF's netdev. None: it does not report them, or the function is a VF.

    ``ports``: for each setting of :data:`ON_PORTS` that the spec gives, its value on every RoCE port; empty without a port.
    """

    trust: str | None = None
    pfc: frozenset[int] | None = None
    ecn_np: frozenset[int] | None = None
    ecn_rp: frozenset[int] | None = None
    ports: Mapping[str, tuple[Value, ...]] = field(factory=dict)


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, RoceState]]:
    """By target, the state of each PF whose ``roce`` the spec gives, and of its VFs."""
    reader = Reader(machine.files)
    states_of = {}
    for address, functions in functions_in_scope(machine.files, want, scope).items():
        wanted = want.nics[address].nic.roce
        if wanted is None:
            continue
        asked = [setting for setting in ON_PORTS if getattr(wanted, setting) is not None]
        states = {}
        for target, pci in functions.items():
            state = _port_state(machine, address) if target == address else RoceState()
            ports = reader.roce_ports(pci) if asked else []
            states[target] = evolve(state, ports=_on_ports(machine, ports, asked)) if ports else state
        states_of[address] = states
    return states_of


def _port_state(machine: Machine, address: str) -> RoceState:
    name = netdev(machine.files, address)
    if name is None:
        return RoceState()
    dcb = machine.dcb.state(name)
    return RoceState(
        trust=_trust(machine.files, name) or (None if dcb is None else _say_trust(dcb.dscp)),
        pfc=dcb.pfc if dcb else None,
        ecn_np=_ecn(machine.files, name, "ecn_np"),
        ecn_rp=_ecn(machine.files, name, "ecn_rp"),
    )


def _trust(files: Files, name: str) -> str | None:
    """The trust mode in MLNX_OFED's file: one word, or several with the current one in brackets."""
    text = read_or(files, f"{NET}/{name}/qos/trust", "")
    match = re.search(r"\[(\w+)\]", text) or re.match(r"(\w+)", text)
    return match[1] if match else None


def _say_trust(entries: frozenset[tuple[int, int]]) -> str:
    """The trust mode with these entries; with other entries than :data:`DSCP_PRIORITIES` as ``dscp 26:5 46:6``."""
    if not entries:
        return "pcp"
    said = "".join(f" {dscp}:{priority}" for dscp, priority in sorted(entries))
    return "dscp" if entries == DSCP_PRIORITIES else f"dscp{said}"


def _entries(trust: str) -> frozenset[tuple[int, int]]:
    """The entries of a trust mode as :func:`_say_trust` writes it."""
    mode, *entries = trust.split()
    pairs = (entry.split(":") for entry in entries)
    given = frozenset((int(dscp), int(priority)) for dscp, priority in pairs)
    return given or (DSCP_PRIORITIES if mode == "dscp" else frozenset())


def _ecn(files: Files, name: str, setting: str) -> frozenset[int] | None:
    folder = f"{NET}/{name}/ecn/{ECN[setting]}/enable"
    priorities = names_in(files, folder)
    on = frozenset(n for n, name in numbered(priorities).items() if read_or(files, f"{folder}/{name}", "0") == "1")
    return on if priorities else None


def _on_ports(machine: Machine, ports: list[tuple[str, int]], asked: list[str]) -> Mapping[str, tuple[Value, ...]]:
    """The requested settings, each with its value on every port."""
    values: dict[str, tuple[Value, ...]] = {}
    if "traffic_class" in asked:
        texts = (read_or(machine.files, _traffic_class(*port), "") for port in ports)
        # Empty until someone writes it (traffic_class_show of MLNX_OFED's mlx5_ib).
        matches = (re.match(r"Global tclass=(\d+)", text) for text in texts)
        values["traffic_class"] = tuple(whole(match[1]) if match else None for match in matches)
    if "cm_tos" in asked or "cm_mode" in asked:
        defaults = [machine.rdma.cm_defaults(*port) for port in ports]
        values["cm_tos"] = tuple(each.tos if each else None for each in defaults)
        values["cm_mode"] = tuple(each.mode if each else None for each in defaults)
    return values


def _traffic_class(device: str, port: int) -> str:
    return f"{RDMA}/{device}/tc/{port}/traffic_class"


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """What differs on each PF's netdev, then what differs on the RoCE ports of the PF and its VFs."""
    changes = []
    for address, nic in links.usable(want, have):
        states: Mapping[str, RoceState] = have[NAME].get(address, {})
        if nic.nic.roce is not None and address in states:
            changes += list(_plan_port(nic, nic.nic.roce, states[address]))
            changes += list(_plan_devices(address, nic.nic.roce, states))
    return changes


def _disruption(nic: WantedNic, setting: str) -> Disruption:
    family = family_of(nic.function.driver)
    flaps = {"trust": family.trust_flaps, "pfc": family.pfc_flaps}
    return Disruption.LINK_FLAP if flaps.get(setting, False) else Disruption.NONE


def _plan_port(nic: WantedNic, wanted: Roce, state: RoceState) -> Iterator[Change]:
    address = nic.function.address
    if wanted.trust is not None and wanted.trust != state.trust:
        yield Change(NAME, address, "trust", state.trust, wanted.trust, _disruption(nic, "trust"))
    for setting, text in (("pfc", wanted.pfc), ("ecn_np", wanted.ecn), ("ecn_rp", wanted.ecn)):
        # A device that does not report the setting has it on for no priority.
        now: frozenset[int] | None = getattr(state, setting)
        if text is not None and frozenset(parse_ranges(text)) != (now or frozenset()):
            before = None if now is None else format_ranges(now) or NO_PRIORITY
            after = format_ranges(parse_ranges(text)) or NO_PRIORITY
            yield Change(NAME, address, setting, before, after, _disruption(nic, setting))


def _plan_devices(address: str, wanted: Roce, states: Mapping[str, RoceState]) -> Iterator[Change]:
    for setting in ON_PORTS:
        after: Value = getattr(wanted, setting)
        if after is None:
            continue
        if not any(state.ports for state in states.values()):
            yield Change(NAME, address, setting, None, after)
        for target, state in sorted(states.items(), key=lambda item: vf_index(item[0]) if is_vf(item[0]) else -1):
            differing = [value for value in state.ports.get(setting, ()) if value != after]
            if differing:
                yield Change(NAME, target, setting, differing[0], after)


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """One setting as it is now."""
    nic = want.nics.get(kept.device)
    field, _, port = kept.field.partition(" ")
    setting = "ecn" if field in ECN else field
    if nic is None or (nic.nic.roce is not None and getattr(nic.nic.roce, setting) is not None):
        return None
    if field in ON_PORTS:
        return Reading(_by_port(machine, kept.target, field).get(port))
    now = getattr(_port_state(machine, kept.device), field)
    value = now if now is None or field == "trust" else format_ranges(now) or NO_PRIORITY
    return Reading(value, False, _disruption(nic, field))


def _by_port(machine: Machine, target: str, setting: str) -> dict[str, Value]:
    """A setting's value on each of a function's ports, as ``device/port``."""
    ports = Reader(machine.files).roce_ports(pci_of(machine.files, target))
    values = _on_ports(machine, ports, [setting])[setting] if ports else ()
    return {f"{device}/{port}": value for (device, port), value in zip(ports, values, strict=True)}


def originals_of(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """The setting; of one that each port has, that of each port."""
    if change.field not in ON_PORTS:
        return [change]
    by_port = _by_port(machine, change.target, change.field)
    return [evolve(change, field=f"{change.field} {port}", before=value) for port, value in by_port.items()]


def in_steps(change: Change) -> bool:
    """A file for each priority, or an entry for each DSCP."""
    return change.field in (*ECN, "trust", "pfc")


def apply(machine: Machine, change: Change) -> None:
    """Set one value, on the PF's netdev, on every RoCE port that the function has now, or on the port that the field names."""
    setting, *named = change.field.split(" ")
    if setting in ON_PORTS:
        reader, function = Reader(machine.files), pci_of(machine.files, change.target)
        ports = reader.roce_ports(function)
        if not ports and (own := reader.below(function)):
            raise OSError(errno.EOPNOTSUPP, f"{', '.join(own)} has no RoCE port: it is InfiniBand, iWARP or switchdev")
        if not ports:
            raise FileNotFoundError(
                errno.ENODEV, f"{change.target} and its VFs have no RoCE device; load its RDMA driver; {LOG_IF_LOADED}"
            )
        for device, port in ports:
            if not named or f"{device}/{port}" in named:
                _set_on_port(machine, evolve(change, field=setting), device, port)
        return
    name = netdev_of(machine.files, change.target)
    if change.field in ECN:
        _set_ecn(machine.files, name, change.field, _priorities(change.after))
        return
    try:
        if change.field == "trust":
            _set_trust(machine, name, str(change.after))
        else:
            machine.dcb.set_pfc(name, _priorities(change.after))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            message = f"the driver of {name} does not support {change.field} {change.after} (DCBNL)"
            raise OSError(errno.EOPNOTSUPP, message) from error
        how = FIRMWARE_LLDP.get(driver(machine.files, change.target) or "")
        if error.errno == errno.EINVAL and how is not None:
            message = f"{error.strerror}: so the driver answers while the NIC's firmware manages DCB ({how.format(name, name)})"
            raise OSError(errno.EINVAL, message) from error
        raise


def _priorities(after: Value) -> frozenset[int]:
    return frozenset(parse_ranges("" if after == NO_PRIORITY else str(after)))


def _set_trust(machine: Machine, name: str, trust: str) -> None:
    if "trust" in names_in(machine.files, f"{NET}/{name}/qos"):
        machine.files.write(f"{NET}/{name}/qos/trust", trust)
        return
    state = machine.dcb.state(name)
    if state is None:
        raise OSError(errno.EOPNOTSUPP, f"the driver of {name} has no DCB")
    # A driver trusts DSCPs while there are entries for them, and PCP again when the last is removed: so the new ones first.
    wanted = _entries(trust)
    if missing := wanted - state.dscp:
        machine.dcb.add_dscp(name, missing)
        # mlx5 replaces the entry of a DSCP (mlx5e_dcbnl_ieee_setapp).
        state = machine.dcb.state(name) or state
    if superfluous := state.dscp - wanted:
        machine.dcb.remove_dscp(name, superfluous)


def _set_ecn(files: Files, name: str, setting: str, priorities: frozenset[int]) -> None:
    now = _ecn(files, name, setting)
    if now is None:
        raise OSError(errno.EOPNOTSUPP, f"{NET}/{name}/ecn is not there; it comes with MLNX_OFED's driver")
    for priority in sorted(priorities ^ now):
        files.write(f"{NET}/{name}/ecn/{ECN[setting]}/enable/{priority}", str(int(priority in priorities)))


def _set_on_port(machine: Machine, change: Change, device: str, port: int) -> None:
    if change.field == "cm_tos":
        machine.rdma.set_cm_defaults(device, port, tos=change.number)
    elif change.field == "cm_mode":
        try:
            machine.rdma.set_cm_defaults(device, port, mode=str(change.after))
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise OSError(errno.EOPNOTSUPP, f"port {port} of {device} has no {change.after}") from error
            raise
    else:
        try:
            machine.files.write(_traffic_class(device, port), str(change.after))
        except FileNotFoundError as error:
            message = f"{device} has no traffic_class; it comes with MLNX_OFED's driver"
            raise OSError(errno.EOPNOTSUPP, message) from error
