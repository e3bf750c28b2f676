"""A way to the API server that a test can listen for elsewhere, and break."""

import socket
import struct
import threading
from contextlib import suppress

from attrs import define, field


@define
class Relay:
    """A way to the API server that can end the connections of now, or swallow what is sent over them and never end them."""

    to: int
    listener: socket.socket = field(factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _silent: threading.Event = field(factory=threading.Event)
    _near: list[socket.socket] = field(factory=list)

    def start(self) -> str:
        """Its URL."""
        threading.Thread(target=self._accept, daemon=True).start()
        return f"https://127.0.0.1:{self.listener.getsockname()[1]}"

    def swallow(self) -> None:
        """From now on nothing comes through what is connected; what connects later is not concerned."""
        silent, self._silent = self._silent, threading.Event()
        silent.set()

    def end(self, reset: bool) -> None:
        """End what is connected now, as a proxy ends idle connections: without a word in TLS, or by a reset."""
        ended, self._near = self._near, []
        for near in ended:
            with suppress(OSError):  # it has ended by itself
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0) if reset else bytes(8))
                near.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
            near.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed by its owner
            while True:
                near = self.listener.accept()[0]
                self._near.append(near)
                far = socket.create_connection(("127.0.0.1", self.to))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(*pair, self._silent), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket, silent: threading.Event) -> None:
        with suppress(OSError):  # the other direction has ended first
            while received := near.recv(65536):
                if not silent.is_set():
                    far.sendall(received)
        far.close()
