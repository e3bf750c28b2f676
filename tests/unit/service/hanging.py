"""A file system with one file, `value`, whose read never returns: the reader waits in the kernel, where no signal ends it.

Run as `python -m tests.unit.service.hanging FOLDER`; it ends with its standard input, and the reads with it. Protocol:
include/uapi/linux/fuse.h. fs/fuse/dev.c, request_wait_answer(): a request that user space has taken is waited out.
"""

import ctypes
import os
import select
import struct
import sys

IN_HEADER = struct.Struct("=IIQQIIIHH")
OUT_HEADER = struct.Struct("=IiQ")
INIT_OUT = struct.Struct("=IIIIHHIIHHI28x")
ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
LOOKUP, FORGET, GETATTR, OPEN, READ, INIT, INTERRUPT, BATCH_FORGET = 1, 2, 3, 14, 15, 26, 36, 42
DIRECT_IO = 1
ROOT, FILE = 1, 2
ENOSYS = 38


def _attr(node: int) -> bytes:
    mode = 0o040755 if node == ROOT else 0o100644
    return ATTR.pack(node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _answer(opcode: int, node: int) -> bytes | None:
    """The answer to a request; None if the request is refused."""
    return {
        INIT: INIT_OUT.pack(7, 31, 0, 0, 1, 1, 4096, 1, 0, 0, 0),
        LOOKUP: struct.pack("=QQQQII", FILE, 0, 0, 0, 0, 0) + _attr(FILE),
        GETATTR: struct.pack("=QII", 0, 0, 0) + _attr(node),
        OPEN: struct.pack("=QII", 1, DIRECT_IO, 0),
    }.get(opcode)


def main(folder: str) -> None:
    fuse = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"hanging", folder.encode(), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    print("mounted", flush=True)  # noqa: T201  whoever started it waits for that
    while True:
        ready, _, _ = select.select([fuse, 0], [], [])
        if 0 in ready:
            libc.umount2(folder.encode(), 2)  # MNT_DETACH
            return
        request = os.read(fuse, 1 << 17)
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
        if opcode in (READ, FORGET, BATCH_FORGET, INTERRUPT):
            continue
        body = _answer(opcode, node)
        error, body = (0, body) if body is not None else (-ENOSYS, b"")
        os.write(fuse, OUT_HEADER.pack(OUT_HEADER.size + len(body), error, unique) + body)


if __name__ == "__main__":
    main(sys.argv[1])
