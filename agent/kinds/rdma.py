"""Observer: the RDMA devices of the NICs for which the spec expects some, read for probes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from agent.hardware.functions import netdevs_by_rdma_port
from agent.hardware.rdma import Gid, RdmaDevice, Reader, gid_fits
from agent.machine import Files, Machine
from agent.report.records import HOST
from agent.spec.nic import RdmaDevices
from agent.state.scope import Scope, functions_in_scope, host_in_scope
from agent.state.wanted import Wanted

NAME = "rdma"
AFTER = ("vf_links",)

RDMA_CM = "rdma_cm"


def read_for(want: Wanted) -> object:
    """Which RDMA devices each NIC of the spec must have, and whether any, also a missing one, must have some."""
    return {address: nic.nic.rdma for address, nic in want.nics.items()}, any(nic.rdma for nic in want.asked)


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Any]]:
    """By target, the RDMA devices of each PF and VF of the NICs whose ``rdma`` the spec gives.

    A port's GIDs are read up to the first that fits the spec; none if the spec names no GID type. Partition keys are
    read only if the spec requires some. Of a function with a netdev for each port only the first port is read. Under HOST,
    :data:`RDMA_CM`: whether /dev/infiniband has that device.
    """
    reader = Reader(machine.files)
    devices: dict[str, Mapping[str, Any]] = {}
    for address, functions in functions_in_scope(machine.files, want, scope).items():
        expected = want.nics[address].nic.rdma
        if expected is not None:
            devices[address] = {
                target: tuple(
                    _device(machine.files, reader, pci, name, expected) for name in reader.carrying(pci, reader.of(pci))
                )
                for target, pci in functions.items()
            }
    if devices or (host_in_scope(scope) and any(nic.rdma is not None for nic in want.asked)):
        devices[HOST] = {RDMA_CM: reader.rdma_cm}
    return devices


def _device(files: Files, reader: Reader, pci: str, name: str, expected: RdmaDevices) -> RdmaDevice:
    device = reader.device(name, reader.char_devices_of(pci, name))
    if len(device.ports) > 1 and len(served := netdevs_by_rdma_port(files, pci)) > 1:
        device = evolve(device, ports=tuple(port for port in device.ports if port.number == next(iter(served))))
    if expected.pkeys:
        keyed = (evolve(port, pkeys=reader.pkeys(name, port.number)) for port in device.ports)
        device = evolve(device, ports=tuple(keyed))
    if expected.gid_type is None:
        return device
    ports = (evolve(port, gids=_gids(reader, device, port.number, expected)) for port in device.ports)
    return evolve(device, ports=tuple(ports))


def _gids(reader: Reader, device: RdmaDevice, number: int, expected: RdmaDevices) -> tuple[Gid, ...]:
    gids: list[Gid] = []
    missing = {*(expected.gid_families or (None,))}
    for gid in reader.gids(device, number):
        gids.append(gid)
        missing = {family for family in missing if not gid_fits(gid, expected.gid_type, family)}
        if not missing:
            break
    return tuple(gids)
