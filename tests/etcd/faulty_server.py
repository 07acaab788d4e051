"""A server that answers wrongly as long as it is told to, and otherwise passes requests on to a real one."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Self

from tests.support import eventually

__all__ = ["Fault", "FaultyServer", "always", "dribble", "endless", "is_whole_http"]

Fault = Callable[[socket.socket, bytes], bool]  # answers a request; False: pass it on


def is_whole_http(data: bytes) -> bool:
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return length is not None and len(body) >= int(length[1])


def always(answer: bytes) -> Fault:
    def fault(client: socket.socket, request: bytes) -> bool:
        client.sendall(answer)
        return True

    return fault


def dribble(start: bytes, part: bytes) -> Fault:
    """One part every 0.1 s, for ten seconds."""

    def fault(client: socket.socket, request: bytes) -> bool:
        client.sendall(start)
        for _ in range(100):
            client.sendall(part)
            time.sleep(0.1)
        return True

    return fault


def endless(start: bytes, part: bytes, most: int) -> Fault:
    """As many bytes as the client reads, up to ``most``."""

    def fault(client: socket.socket, request: bytes) -> bool:
        client.sendall(start)
        for _ in range(most // len(part)):
            client.sendall(part)
        return True

    return fault


class FaultyServer:
    """On a loopback port, in front of that of a real server. ``is_whole``: whether these bytes are a whole request."""

    def __init__(self, port: int, is_whole: Callable[[bytes], bool]) -> None:
        self._port, self._is_whole = port, is_whole
        self.fault: Fault | None = None
        self.opened = count(1)
        self.answered: list[int] = []  # for each wrong answer: the number of its connection
        self.passed_on: list[int] = []  # for each request that was passed on, likewise
        self.busy = 0  # wrong answers that are being sent
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, server]
                threading.Thread(target=self._serve, args=(client, server, next(self.opened)), daemon=True).start()
                threading.Thread(target=self._return, args=(client, server), daemon=True).start()

    def _serve(self, client: socket.socket, server: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError), client, server:
            data = b""
            while part := client.recv(65536):
                data += part
                if not self._is_whole(data):
                    continue
                request, data = data, b""
                if not self._answer(client, request, number):
                    self.passed_on.append(number)
                    server.sendall(request)
            server.shutdown(socket.SHUT_RDWR)

    def _answer(self, client: socket.socket, request: bytes, number: int) -> bool:
        fault = self.fault
        if fault is None:
            return False
        self.busy += 1
        try:
            wrong = fault(client, request)
        except OSError:  # the client has given up
            self.answered.append(number)
            raise
        finally:
            self.busy -= 1
        if wrong:
            self.answered.append(number)
        return wrong

    def _return(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := server.recv(65536):
                client.sendall(part)
            client.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        """Answer rightly from now on. No connection with a wrong answer may be used any more."""
        self.fault = None
        eventually(lambda: not self.busy, 15.0, "the client gives up the answer under way")
        self.passed_on.clear()

    def check_no_reuse(self) -> None:
        assert self.answered
        assert self.passed_on
        assert not set(self.answered) & set(self.passed_on)

    def close(self) -> None:
        self.fault = None
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
