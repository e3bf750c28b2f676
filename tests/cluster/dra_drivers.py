"""What DRA drivers publish of a DGX H100 whose rails run RoCE, with each name and attribute as the drivers have it.

Read in kubernetes-sigs/dranet f258477 (pkg/inventory/db.go, pkg/names), k8snetworkplumbingwg/dra-driver-sriov cd9404f
(pkg/devicestate/discovery.go, pkg/consts) and kubernetes-sigs/dra-driver-nvidia-gpu 9593204
(cmd/gpu-kubelet-plugin/deviceinfo.go).
The addresses are those of the zoo's machine. Made up: the PCIe roots, one for a rail and the GPU on the next buses.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from attrs import frozen

from agent.spec.node import from_mapping
from tasks.kubernetes.manifests.device_plugins import SRIOV_DRIVER
from tasks.kubernetes.manifests.discovered import Discovered, discover
from tests.cluster import objects
from tests.deploy.hardware import function, hardware, nic, nics, rdma

DRANET, GPU_DRIVER, STANDARD = "dra.net", "gpu.nvidia.com", "resource.kubernetes.io"
VFS = 2
"""How many VFs each rail has."""

ZOO = Path(__file__).parent.parent / "zoo" / "dgx-h100.yaml"
MACHINE = yaml.safe_load(ZOO.read_text())


@frozen
class Rail:
    """A NIC: its PF's address, netdev and RDMA device."""

    index: int
    address: str
    netdev: str
    rdma: str
    numa_node: int

    @property
    def name(self) -> str:
        """The NIC's name in the spec."""
        return f"rail{self.index}"

    def vf(self, index: int) -> str:
        """The address of a VF: the next functions, as of a card with one port."""
        return f"{self.address[:-1]}{index + 1}"


RAILS = tuple(
    Rail(
        index,
        each["address"],
        each["netdevs"][0]["name"].replace("ib", "en"),
        each["rdma"][0]["name"],
        each["numa_node"],
    )
    for index, each in enumerate(
        f for f in MACHINE["functions"] if f.get("rdma") and f["address"][5:7] not in ("29", "aa")
    )
)


def discovered() -> Discovered:
    """The machine as the deploy's tasks see it."""
    cards = []
    for rail in RAILS:
        vfs = [
            function(rail.vf(n), "15b3:101e", f"{rail.netdev}v{n}", rdma(f"{rail.rdma}_{n}"), index=n)
            for n in range(VFS)
        ]
        cards.append(nic(rail.name, function(rail.address, "15b3:1021", rail.netdev, rdma(rail.rdma), vfs=vfs)))
    spec = from_mapping({"node_name": "a", "nics": nics(*cards)})
    gpus = tuple(f"gpu {gpu['address']} nvidia" for gpu in MACHINE["gpus"])
    return discover(hardware(*cards, others=gpus), spec, {})


def root(address: str) -> str:
    """The PCIe root of a function."""
    return "pci0000:" + max(rail.address[5:7] for rail in RAILS if rail.address[5:7] <= address[5:7])


def _device(name: str, *attributes: Mapping[str, str | int | bool]) -> dict[str, Any]:
    kinds = {str: "string", int: "int", bool: "bool"}
    given = {key: value for each in attributes for key, value in each.items()}
    return {"name": name, "attributes": {key: {kinds[type(value)]: value} for key, value in given.items()}}


def _of(domain: str, **attributes: str | int | bool) -> dict[str, str | int | bool]:
    return {f"{domain}/{key}": value for key, value in attributes.items()}


def _dashed(address: str) -> str:
    return address.replace(":", "-").replace(".", "-")


def dranet() -> list[dict[str, Any]]:
    """dranet's devices: PFs and VFs, and a netdev that is no PCI device."""
    virtual = _of(DRANET, ifName="dummy0", mac="02:00:00:00:00:02", mtu=1500, encapsulation="ether", alias="")
    more = _of(DRANET, state="unknown", type="dummy", ebpf=False, virtual=True, sriov=False, rdma=False)
    devices = [_device("dummy0", virtual, more)]
    for rail in RAILS:
        for index in (None, *range(VFS)):
            is_pf = index is None
            address = rail.address if index is None else rail.vf(index)
            netdev = rail.netdev if is_pf else f"{rail.netdev}v{index}"
            devices.append(
                _device(
                    f"pci-{_dashed(address)}",
                    _of(DRANET, pciAddress=address, ifName=netdev, mac="02:00:00:00:00:01", mtu=4200, alias=""),
                    _of(
                        DRANET, encapsulation="ether", state="up", type="device", ebpf=False, virtual=False, sriov=is_pf
                    ),
                    _of(DRANET, sriovVfs=VFS) if is_pf else _of(DRANET, isSriovVf=True),
                    _of(DRANET, rdma=True, rdmaDevice=rail.rdma, numaNode=rail.numa_node, pciSubsystem="0041"),
                    _of(DRANET, pciVendor="Mellanox Technologies", pciDevice="MT2910 Family [ConnectX-7]"),
                    _of(STANDARD, pcieRoot=root(address), numaNode=rail.numa_node),
                )
            )
    return devices


def sriov() -> list[dict[str, Any]]:
    """dra-driver-sriov's devices: the VFs that a policy selects."""
    return [
        _device(
            _dashed(rail.vf(index)),
            _of(SRIOV_DRIVER, vendor="15b3", deviceID="101e", pfDeviceID="1021", pciAddress=rail.vf(index)),
            _of(SRIOV_DRIVER, PFName=rail.netdev, EswitchMode="legacy", vfID=index, pfPciAddress=rail.address),
            _of(SRIOV_DRIVER, linkType="ethernet", rdmaCapable=True),
            _of("k8s.cni.cncf.io", deviceID=rail.vf(index)),
            _of(STANDARD, pcieRoot=root(rail.vf(index)), pciBusID=rail.vf(index)),
            _of(DRANET, numaNode=rail.numa_node),
        )
        for rail in RAILS
        for index in range(VFS)
    ]


def gpus() -> list[dict[str, Any]]:
    """The devices of NVIDIA's driver. An attribute without a domain is of the driver's."""
    return [
        _device(
            f"gpu-{minor}",
            {"type": "gpu", "uuid": f"GPU-{minor}", "productName": "NVIDIA H100 80GB HBM3", "architecture": "Hopper"},
            _of(STANDARD, pciBusID=gpu["address"], pcieRoot=root(gpu["address"]), numaNode=gpu["numa_node"]),
        )
        for minor, gpu in enumerate(MACHINE["gpus"])
    ]


DEVICES = {DRANET: dranet, SRIOV_DRIVER: sriov, GPU_DRIVER: gpus}


def resource_slice(node: str, driver: str) -> dict[str, Any]:
    """What a driver publishes of a node."""
    return objects.resource_slice(node, driver, DEVICES[driver](), f"{node}-{driver}")
