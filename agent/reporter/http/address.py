"""Where the reporter listens: on a loopback address, which only this machine can reach."""

from __future__ import annotations

import ipaddress
import re
import socket

from attrs import frozen

LAST_PORT = 65535


class CannotServe(Exception):
    """The reporter cannot serve with these options. The message says why, and the remedy."""


@frozen
class Address:
    """Where to listen: an IP address and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``127.0.0.1:9809`` or ``[::1]:9809``.

        :raises CannotServe: it is neither, or other machines can reach it.
        """
        host, _, port = text.rpartition(":")
        try:
            address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            address = None
        if address is None or not re.fullmatch("[0-9]{1,5}", port) or int(port) > LAST_PORT:
            raise CannotServe(
                f"{text!r} is not an address; give an IP address and a port from 0 to {LAST_PORT}, as 127.0.0.1:9809"
            )
        if not address.is_loopback:
            raise CannotServe(
                f"other machines can reach {address}, and the reporter has no TLS; listen on 127.0.0.1, and let a proxy answer"
            )
        return cls(str(address), int(port))

    @property
    def family(self) -> socket.AddressFamily:
        """AF_INET or AF_INET6."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET
