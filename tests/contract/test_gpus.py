"""NVIDIA's driver lists the GPUs of the PCI bus. This needs a machine with the driver."""

import pytest

from agent.hardware.functions import driver
from agent.hardware.sysfs import names_in
from agent.linux import machine
from agent.probes.gpus import GPUS, MODULE
from cli.topology import gpus


def test_the_driver_lists_every_gpu_of_the_bus_by_its_pci_address() -> None:
    files = machine().files
    if not names_in(files, MODULE):
        pytest.skip("NVIDIA's driver is not loaded here")
    on_the_bus = [address for address, _ in gpus(files)]
    assert sorted(names_in(files, GPUS)) == sorted(on_the_bus) != []
    assert {driver(files, address) for address in on_the_bus} == {"nvidia"}
