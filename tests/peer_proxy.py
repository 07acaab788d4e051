"""A TCP proxy in front of a member of a cluster, which can hold back what the member sends, and then let it go.

    with PeerProxy(member_port) as proxy:
        proxy.stall()   # what the member sends waits in the proxy
        proxy.resume()  # and arrives late, in order

Bytes to the member always pass. Connections are not cut, so both ends think that the network is slow.
"""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self

__all__ = ["PeerProxy"]


class PeerProxy:
    def __init__(self, port: int) -> None:
        self._target = port
        self._flows = threading.Event()
        self._flows.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._sockets: set[socket.socket] = {self._server}
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def _accept(self) -> None:
        while True:
            try:
                dialer, _ = self._server.accept()
            except OSError:
                return  # closed
            try:
                member = socket.create_connection(("127.0.0.1", self._target), 5.0)
            except OSError:
                dialer.close()
                continue
            member.settimeout(None)
            self._sockets |= {dialer, member}
            threading.Thread(target=self._pass, args=(dialer, member, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(member, dialer, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, held_back: bool) -> None:
        try:
            while data := source.recv(65536):
                if held_back:
                    self._flows.wait()
                sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other direction has done it
            self._sockets.discard(each)
            each.close()

    def close(self) -> None:
        self._flows.set()
        for each in list(self._sockets):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
