"""Where the reporter listens, and what protects an address that other machines can reach: TLS and a token."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
import ssl
from pathlib import Path

from attrs import frozen

from agent.documents import read

LONGEST_TOKEN = 4096
"""Bytes of the token's file: a client must be able to send the token in a request."""

LARGEST_PEM = 1 << 20
"""Bytes of a file with a certificate and its chain, or a key."""

LAST_PORT = 65535


class CannotServe(Exception):
    """The reporter must not serve with these options. The message says why, and the remedy."""


@frozen
class Address:
    """Where to listen: an IP address and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``127.0.0.1:9809`` or ``[::1]:9809``.

        :raises CannotServe: it is neither.
        """
        host, _, port = text.rpartition(":")
        try:
            address = str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
        except ValueError:
            address = ""
        if not address or not re.fullmatch("[0-9]{1,5}", port) or int(port) > LAST_PORT:
            raise CannotServe(
                f"{text!r} is not an address; give an IP address and a port from 0 to {LAST_PORT}, as 127.0.0.1:9809"
            )
        return cls(address, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def family(self) -> socket.AddressFamily:
        """AF_INET or AF_INET6."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET


@frozen
class Guard:
    """What protects an address: TLS, and a token that every request must carry. ``None``: not used."""

    tls: ssl.SSLContext | None = None
    token: bytes | None = None

    @classmethod
    def load(cls, address: Address, certificate: Path | None, key: Path | None, token: Path | None) -> Guard:
        """Read the files.

        :raises CannotServe: the address can be reached from other machines and a file is not given, or a file is invalid.
        """
        given = {"--tls-cert": certificate, "--tls-key": key, "--token-file": token}
        lacking = [option for option, path in given.items() if path is None]
        if lacking and not address.is_loopback:
            raise CannotServe(
                f"{address.host} can be reached from elsewhere: give {', '.join(lacking)}, or listen on 127.0.0.1"
            )
        if (certificate is None) != (key is None):
            raise CannotServe("a certificate needs its key: give both --tls-cert and --tls-key")
        secret = None
        if token is not None:
            secret = _read(token, LONGEST_TOKEN).strip().encode()
            if len(secret) < 16 or not secret.isascii():
                raise CannotServe(
                    f"{token}: a token has 16 characters at least, all of ASCII; make one: openssl rand -hex 32"
                )
        return cls(_tls(certificate, key) if certificate and key else None, secret)

    def admits(self, authorization: str) -> bool:
        """Whether a request with this ``Authorization`` header is answered."""
        if self.token is None:
            return True
        scheme, _, token = authorization.partition(" ")
        # In constant time, so that the duration reveals nothing about the token.
        return hmac.compare_digest(token.strip().encode(), self.token) and scheme.lower() == "bearer"


def _read(path: Path, largest: int) -> str:
    try:
        return read(path, largest)
    except UnicodeDecodeError:
        raise CannotServe(f"{path}: it is not UTF-8 text; check the path") from None
    except (OSError, ValueError) as error:
        raise CannotServe(f"{path}: {getattr(error, 'strerror', None) or error}; check the path") from None


def _tls(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path in (certificate, key):
        # OpenSSL would wait for the writer of a FIFO, and has no limit.
        _read(path, LARGEST_PEM)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise CannotServe(
            f"{certificate} and {key}: {error}; give a PEM certificate and the key that belongs to it"
        ) from None
    return context
