"""Installed kernel modules by libkmod, and the clock's synchronisation by timedated."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from jeepney import DBusAddress, Properties
from jeepney.io.blocking import open_dbus_connection
from jeepney.low_level import MessageType

LIBKMOD = "libkmod.so.2"

# org.freedesktop.timedate1(5). D-Bus may have to start it, hence the long timeout.
TIMEDATED = DBusAddress("/org/freedesktop/timedate1", "org.freedesktop.timedate1", "org.freedesktop.timedate1")
TIMEDATED_TIMEOUT = 60.0


class LinuxSystem:
    """libkmod by ctypes, which releases the interpreter lock during calls, and timedated by D-Bus."""

    def installed_srcversion(self, module: str) -> str | None:
        """Read what modinfo(8) prints. libkmod finds and unpacks a module as modprobe(8) does, without a process."""
        library = _libkmod()
        if library is None:
            return None
        with _context(library) as context:
            handle = ctypes.c_void_p()
            if library.kmod_module_new_from_name(context, module.encode(), ctypes.byref(handle)) < 0:
                return None
            try:
                return next((value for key, value in _info(library, handle) if key == "srcversion"), None)
            finally:
                library.kmod_module_unref(handle)

    def clock_synchronised(self) -> bool:
        """Ask timedated, as timedatectl(1) does: the unit's sandbox (ProtectClock=) refuses adjtimex(2) even for reading."""
        try:
            with open_dbus_connection(bus="SYSTEM") as bus:
                reply = bus.send_and_get_reply(Properties(TIMEDATED).get("NTPSynchronized"), timeout=TIMEDATED_TIMEOUT)
        except (EOFError, TimeoutError) as error:
            raise OSError(errno.EIO, f"timedated does not answer: {error}") from error
        except OSError as error:
            raise OSError(error.errno, f"the system's D-Bus cannot be reached ({error.strerror})") from error
        if reply.header.message_type is not MessageType.method_return:
            raise OSError(errno.EIO, f"timedated answers with an error: {' '.join(map(str, reply.body))}")
        ((_, synchronised),) = reply.body
        return bool(synchronised)


@cache
def _libkmod() -> ctypes.CDLL | None:
    """The library with the prototypes of libkmod.h; None if the machine has none."""
    try:
        library = ctypes.CDLL(LIBKMOD)
    except OSError:
        return None
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    for name, result, arguments in (
        ("kmod_new", pointer, [text, ctypes.POINTER(text)]),
        ("kmod_unref", pointer, [pointer]),
        ("kmod_module_new_from_name", ctypes.c_int, [pointer, text, ctypes.POINTER(pointer)]),
        ("kmod_module_unref", pointer, [pointer]),
        ("kmod_module_get_info", ctypes.c_int, [pointer, ctypes.POINTER(pointer)]),
        ("kmod_module_info_get_key", text, [pointer]),
        ("kmod_module_info_get_value", text, [pointer]),
        ("kmod_module_info_free_list", None, [pointer]),
        ("kmod_list_next", pointer, [pointer, pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@contextmanager
def _context(library: ctypes.CDLL) -> Iterator[int]:
    # Through /proc/1/root, since the unit itself sees an empty folder (ProtectKernelModules=).
    folder = f"/proc/1/root/lib/modules/{os.uname().release}"
    # The empty list means: read no configuration (/etc/modprobe.d).
    context = library.kmod_new(folder.encode(), (ctypes.c_char_p * 1)())
    if not context:
        raise MemoryError
    try:
        yield context
    finally:
        library.kmod_unref(context)


def _info(library: ctypes.CDLL, module: ctypes.c_void_p) -> Iterator[tuple[str, str]]:
    """The information in a module's file; none if there is no file, or the module is built into the kernel."""
    first = ctypes.c_void_p()
    if library.kmod_module_get_info(module, ctypes.byref(first)) < 0 or not first.value:
        return
    try:
        entry = first.value
        while entry:
            key, value = library.kmod_module_info_get_key(entry), library.kmod_module_info_get_value(entry)
            yield key.decode(errors="replace"), value.decode(errors="replace")
            entry = library.kmod_list_next(first, entry)
    finally:
        library.kmod_module_info_free_list(first)
