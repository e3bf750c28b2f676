"""SHA-256 by Python's own code where Python has it: hashlib loads OpenSSL, which takes 4 MB of memory in each process."""

from __future__ import annotations

try:
    from _sha2 import sha256  # type: ignore[import-not-found, unused-ignore]  # Python 3.12
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found, no-redef, unused-ignore]
    except ImportError:
        from hashlib import sha256  # RHEL builds Python without it


def digest(data: bytes) -> bytes:
    """The SHA-256 of some bytes: 32 bytes."""
    value: bytes = sha256(data).digest()
    return value
