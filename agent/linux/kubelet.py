"""The devices and the CPUs of pods: List of the kubelet's PodResources API
(k8s.io/kubelet/pkg/apis/podresources/v1/api.proto).

The device plugin, or the driver of dynamic resource allocation (DRA), chooses a device's name. By their sources, it is:

- sriov-network-device-plugin: a VF's PCI address, or a subfunction's name on the auxiliary bus (``mlx5_core.sf.4``);
- dra-driver-sriov and dranet: a PCI address with dashes (``0000-3b-00-2``), in the device's name and at its CDI name's end;
- alibabacloud-erdma-controller: an RDMA device's name and the number of a share of it (``erdma_0/17``);
- KubeVirt (``permittedHostDevices``): the number of the function's IOMMU group;
- k8s-rdma-shared-dev-plugin: only the number of a share, the same for all the devices of a resource. That tells no
  device from another: open descriptors of its uverbs tell who uses one.

A kubelet that has just started, and does not know its pods yet, answers that there are none.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TypeVar

from attrs import define

from agent.linux.grpc import Schema, call, fields, numbers, strings
from agent.report.names import KUBELET_FOLDERS

SOCKETS = tuple(f"{folder}/pod-resources/kubelet.sock" for folder in KUBELET_FOLDERS)
LIST = "/v1.PodResourcesLister/List"
TIMEOUT = 2.0

# The list is requested once for each function, and a kubelet that hangs must not cost two seconds each time.
PAUSE = 10.0

# No socket, nothing behind it: there is no kubelet, or it is stopped.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED})

# The kubelet answers 100 requests a second, and ten at once, of all its clients together
# (pkg/kubelet/apis/podresources/constants.go). A pass that writes to many VFs makes more.
RATE = 100.0

REMEDIES = {errno.ENOSYS: "this kubelet is older than Kubernetes 1.20, which brought version 1 of the PodResources API"}

# Field numbers of api.proto: the response's `pod_resources`; a pod's `containers`, and its `cpu_ids` (Kubernetes 1.37), which
# include those of containers that share them; a container's `cpu_ids`. POD: the texts that are read of a pod.
PODS, CONTAINERS, POD_CPU_IDS, CPU_IDS = 1, 3, 4, 3
POD: Schema = {
    1: "name",
    2: "namespace",
    # Fields of a container: device_ids of devices; device_name and the name of cdi_devices in claim_resources of
    # dynamic_resources.
    3: {2: {2: "device"}, 5: {4: {4: "claimed", 1: {1: "claimed"}}}},
}

PCI_ADDRESS = re.compile(r"(?<![0-9a-z])([0-9a-f]{4,8})[:-]([0-9a-f]{2})[:-]([0-9a-f]{2})[.-]([0-7])(?![0-9a-z])")


Allocations = Mapping[str, tuple[str, ...]]
T = TypeVar("T")


@define
class LinuxKubelet:
    """The kubelet on the first socket that answers."""

    sockets: tuple[str, ...] = SOCKETS
    timeout: float = TIMEOUT
    clock: Callable[[], float] = time.monotonic
    _failure: tuple[float, int, str] | None = None

    def allocations(self) -> Allocations:
        """Request the list."""
        return self._read(_by_device)

    def cpus(self) -> Mapping[str, frozenset[int]]:
        """Request the list."""
        return self._read(_cpus_by_device)

    def _read(self, decode: Callable[[bytes], Mapping[str, T]]) -> Mapping[str, T]:
        """What the list says. After a failure, the same error is raised without a request for :data:`PAUSE` seconds."""
        if self._failure is not None and self.clock() < self._failure[0]:
            raise OSError(*self._failure[1:])
        for path in self.sockets:
            try:
                if (response := _response(path, self.timeout)) is not None:
                    return decode(response)
            except (OSError, ValueError) as error:
                number, message = _explain(path, error)
                self._failure = (self.clock() + PAUSE, number, message)
                raise OSError(number, message) from error
        return {}

    def started(self) -> float:
        """The time of its newest socket: a kubelet creates it again at each start, whatever its program is called."""
        made = [0.0]
        for path in self.sockets:
            with suppress(OSError):  # the path of another distribution
                made.append(os.stat(path).st_mtime)  # noqa: PTH116  each pass asks, and a Path costs more than the call
        return max(made)


def _response(path: str, timeout: float) -> bytes | None:
    """The kubelet's answer; None: there is no kubelet. A request that its rate limit refuses is made again."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            if (connection := _connect(path, timeout)) is None:
                return None
            with connection:
                return call(connection, LIST, timeout)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                raise
        time.sleep(1 / RATE)


def _connect(path: str, timeout: float) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        if error.errno in ABSENT:
            return None
        raise
    return connection


def _explain(path: str, error: OSError | ValueError) -> tuple[int, str]:
    if isinstance(error, ValueError):
        return errno.EPROTO, f"{path}: the answer is not a list of pods: {error}; see the kubelet's version and its log"
    number = error.errno or errno.EIO
    remedy = REMEDIES.get(number, "see the kubelet's log")
    return number, f"{path}: {error.strerror or error}; {remedy}"


def _by_device(response: bytes) -> Allocations:
    """The pods of each device in a ListPodResourcesResponse, sorted.

    :raises ValueError: the response is not such a message.
    """
    by_device: dict[str, set[str]] = {}
    for number, pod in fields(response):
        if number == PODS:
            pod_fields = list(strings(pod, POD))
            names = dict(pod_fields)
            for device in _devices(pod_fields):
                by_device.setdefault(device, set()).add(f"{names.get('namespace', '')}/{names.get('name', '')}")
    return {device: tuple(sorted(pods)) for device, pods in by_device.items()}


def _cpus_by_device(response: bytes) -> Mapping[str, frozenset[int]]:
    """The CPUs of the pods of each device in such a message.

    :raises ValueError: the response is not such a message.
    """
    by_device: dict[str, frozenset[int]] = {}
    for number, pod in fields(response):
        if number == PODS:
            holders = [(pod, POD_CPU_IDS), *((each, CPU_IDS) for number, each in fields(pod) if number == CONTAINERS)]
            given = (content for holder, own in holders for number, content in fields(holder) if number == own)
            cpus = frozenset(cpu for content in given for cpu in numbers(content))
            for device in _devices(list(strings(pod, POD))):
                by_device[device] = by_device.get(device, cpus) | cpus
    return by_device


def _devices(fields: list[tuple[str, str]]) -> Iterator[str]:
    """A pod's devices: PCI addresses, or the device plugin's names without the number of the share."""
    for what, text in fields:
        if what in ("device", "claimed"):
            addresses = PCI_ADDRESS.findall(text.lower())
            for domain, bus, device, function in addresses:
                yield f"{domain}:{bus}:{device}.{function}"
            if what == "device" and not addresses:
                yield text.partition("/")[0]
