"""The output of MONITOR: every request that a client sent, in the order in which the server ran them.

MONITOR also shows what scripts call, with ``lua`` in place of an address; those lines are skipped.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

__all__ = ["Monitor", "Request", "Turns", "count_out_of_turn"]

_LAST: Final = b"bench:this-is-the-last"
_LINE: Final = re.compile(rb'\+(\d+\.\d+) \[\d+ ([^\]]+)\] (".*")')
_ARGUMENT: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"')


class Request(NamedTuple):
    at: float  # by the clock of the server
    client: str  # its address
    text: bytes

    @property
    def arguments(self) -> list[bytes]:
        return _ARGUMENT.findall(self.text)


class Monitor:
    """A connection in MONITOR mode. A thread reads it, so that the output does not pile up in the server."""

    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)
        self._socket = socket.create_connection(self._address)
        self._chunks: list[bytes] = []
        self._socket.sendall(b"MONITOR\r\n")
        if self._socket.recv(5) != b"+OK\r\n":
            raise RuntimeError("the server refuses MONITOR")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        tail = b""
        while _LAST not in tail and (chunk := self._socket.recv(1 << 18)):
            self._chunks.append(chunk)
            tail = tail[-len(_LAST) :] + chunk

    def stop(self) -> None:
        """Read up to a last request of our own, so that no request before it is missed."""
        with socket.create_connection(self._address) as other:
            other.sendall(b"ECHO %s\r\n" % _LAST)
            other.recv(100)
        self._thread.join()
        self._socket.close()

    def requests(self, begin: float, end: float, *, but: Sequence[str] = ()) -> Iterator[Request]:
        """The requests between two times of the wall clock, from all clients except ``but``."""
        for line in b"".join(self._chunks).split(b"\r\n"):
            if b" lua] " in line:
                continue
            found = _LINE.match(line)
            if found is None:
                continue
            request = Request(float(found[1]), found[2].decode(), found[3])
            if begin <= request.at < end and request.client not in but:
                yield request

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class Turns(NamedTuple):
    """The order of the grants, compared with the order of the first requests."""

    grants: int
    out_of_turn: int  # grants while a caller with an earlier first request was still waiting


def count_out_of_turn(requests: Iterator[Request], granted: Sequence[str]) -> Turns:
    """Count the grants that came before a grant whose first request was earlier.

    ``granted``: the tokens of the acquisitions, in the order of the grants. The first request of an acquisition is the
    first that carries its token.
    """
    wanted = {token.encode(): token for token in granted}
    asked: dict[str, int] = {}
    for number, request in enumerate(requests):
        for argument in request.arguments:
            token = wanted.get(argument)
            if token is not None:
                asked.setdefault(token, number)
    places = [asked[token] for token in granted if token in asked]
    out_of_turn = 0
    earliest_to_come = len(asked) and max(places) + 1
    for place in reversed(places):
        out_of_turn += place > earliest_to_come
        earliest_to_come = min(earliest_to_come, place)
    return Turns(len(places), out_of_turn)
