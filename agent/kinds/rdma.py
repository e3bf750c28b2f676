"""The RDMA devices of the NICs of which the spec expects some: read for probes. Nothing to plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from agent.hardware.rdma import Gid, RdmaDevice, Reader, gid_fits
from agent.machine import Machine
from agent.report.records import HOST, Change
from agent.spec.nic import RdmaDevices
from agent.state.scope import Scope, functions_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "rdma"
AFTER = ("vf_links",)
UNKNOWN_UNTIL: tuple[str, ...] = ()
REACH = "function"

RDMA_CM = "rdma_cm"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Any]]:
    """By target, the devices that serve each PF and VF of the NICs whose ``rdma`` the spec gives.

    The GIDs of a port are those up to the first that the spec asks for, none if it asks for none. The host's
    :data:`RDMA_CM`: whether /dev/infiniband has it.
    """
    reader = Reader(machine.files)
    found: dict[str, Mapping[str, Any]] = {}
    for address, functions in functions_in_scope(machine.files, want, scope).items():
        expected = want.nics[address].nic.rdma
        if expected is not None:
            found[address] = {
                target: tuple(_device(reader, pci, name, expected) for name in reader.of(pci))
                for target, pci in functions.items()
            }
            found[HOST] = {RDMA_CM: reader.rdma_cm}
    return found


def _device(reader: Reader, pci: str, name: str, expected: RdmaDevices) -> RdmaDevice:
    device = reader.device(name, reader.char_devices_of(pci, name))
    if expected.gid_type is None:
        return device
    ports = (evolve(port, gids=_gids(reader, device, port.number, expected)) for port in device.ports)
    return evolve(device, ports=tuple(ports))


def _gids(reader: Reader, device: RdmaDevice, number: int, expected: RdmaDevices) -> tuple[Gid, ...]:
    found = []
    for gid in reader.gids(device, number):
        found.append(gid)
        if gid_fits(gid, expected.gid_type, family="IPv4" if expected.gid_ipv4 else None):
            break
    return tuple(found)


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """Nothing: what is expected of RDMA devices is judged by probes, since nobody can write it."""
    return []


def apply(machine: Machine, change: Change) -> None:
    """Never called, since nothing is planned."""
    raise NotImplementedError(change.kind)
