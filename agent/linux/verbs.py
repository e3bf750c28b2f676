"""What an RDMA port says through libibverbs and sysfs does not have.

Prototypes and structures: rdma-core, libibverbs/verbs.h. Only `inspect` uses this; nothing is imported by the daemon.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection

from agent.machine import PortMtus, RdmaPortKey

LIBRARY = "libibverbs.so.1"

# The exported ibv_query_port fills struct _compat_ibv_port_attr (48 bytes); room for that of any later version.
PORT_ATTR_SIZE = 256


class _PortAttr(ctypes.Structure):
    """The first members of struct ibv_port_attr, the same in each of its versions."""

    _fields_ = (
        ("state", ctypes.c_int),
        ("max_mtu", ctypes.c_int),
        ("active_mtu", ctypes.c_int),
        ("_rest", ctypes.c_char * (PORT_ATTR_SIZE - 12)),
    )


def mtu_bytes(code: int) -> int | None:
    """The bytes that an enum ibv_mtu stands for: IBV_MTU_256 is 1, IBV_MTU_4096 is 5."""
    return 128 << code if 1 <= code <= 5 else None


def port_mtus(ports: Collection[RdmaPortKey]) -> PortMtus:
    """The largest and the active MTU (bytes) of each of ``ports`` (RDMA device, port number).

    Left out is what cannot be asked: no library on this machine, no provider for the device, no character device.
    """
    if not ports or (library := _load()) is None:
        return {}
    devices = library.ibv_get_device_list(None)
    if not devices:
        return {}
    found = {}
    try:
        position = 0
        while device := devices[position]:
            position += 1
            name = library.ibv_get_device_name(device).decode(errors="replace")
            numbers = sorted(number for wanted, number in ports if wanted == name)
            for number, attributes in _query(library, device, numbers):
                found[name, number] = mtu_bytes(attributes.max_mtu), mtu_bytes(attributes.active_mtu)
    finally:
        library.ibv_free_device_list(devices)
    return found


def _query(library: ctypes.CDLL, device: int, numbers: list[int]) -> list[tuple[int, _PortAttr]]:
    context = library.ibv_open_device(device) if numbers else None
    if not context:
        return []
    found = []
    try:
        for number in numbers:
            attributes = _PortAttr()
            if library.ibv_query_port(context, number, ctypes.byref(attributes)) == 0:
                found.append((number, attributes))
    finally:
        library.ibv_close_device(context)
    return found


def _load() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_list.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.ibv_free_device_list.restype = None
    library.ibv_free_device_list.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    library.ibv_get_device_name.restype = ctypes.c_char_p
    library.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    library.ibv_open_device.restype = ctypes.c_void_p
    library.ibv_open_device.argtypes = [ctypes.c_void_p]
    library.ibv_close_device.argtypes = [ctypes.c_void_p]
    library.ibv_query_port.argtypes = [ctypes.c_void_p, ctypes.c_uint8, ctypes.c_void_p]
    return library
