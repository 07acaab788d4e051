"""A link with a delay: a process that forwards every chunk a fixed time after its arrival, in both directions.

All libraries are measured through the same relay, so it adds the same to each. The relay must not be the bottleneck:
``Relay.capacity`` says how much it can forward, ``Relay.figures`` how much it did forward and how busy it was.

The relay is one loop around ``select``, because asyncio and ``epoll`` can wait for whole milliseconds only. The delay
is the same for every chunk, so the waiting chunks are a queue, and the first of them is always due next.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import time
from collections import deque
from collections.abc import Collection
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Final, NamedTuple, Self

__all__ = ["DELAY_S", "Figures", "Relay"]

DELAY_S: Final = 0.0005
_CHUNK: Final = 1 << 16
_PING: Final = b"*1\r\n$4\r\nPING\r\n"
_PONG: Final = b"+PONG\r\n"
FLOOD_S: Final = 1.0
FLOOD_CONNECTIONS: Final = 64


class Figures(NamedTuple):
    """What a relay has done since the last call of ``Relay.figures``."""

    seconds: float
    chunks: int
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.chunks / self.seconds

    @property
    def busy(self) -> float:
        return self.cpu_s / self.seconds


class Relay:
    """A running relay to a port of this machine; ``port`` is its own."""

    def __init__(self, to_port: int, delay_s: float = DELAY_S) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        context = multiprocessing.get_context("fork")  # so that the process inherits the listener
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(listener, to_port, delay_s, theirs), daemon=True)
        self._process.start()
        theirs.close()
        listener.close()

    def figures(self) -> Figures:
        self._pipe.send("figures")
        figures: Figures = self._pipe.recv()
        return figures

    def place(self, cores: Collection[int]) -> None:
        """Pin the relay to these cores."""
        if self._process.pid is not None:
            os.sched_setaffinity(self._process.pid, cores)

    def round_trip(self, tries: int = 200) -> float:
        """Median seconds from a PING to its reply through the relay."""
        took = []
        with socket.create_connection(("127.0.0.1", self.port)) as link:
            for _ in range(tries):
                began = time.perf_counter()
                link.sendall(_PING)
                link.recv(_CHUNK)
                took.append(time.perf_counter() - began)
        return sorted(took)[tries // 2]

    def capacity(self) -> Figures:
        """What the relay forwards while many connections send a PING each time they get a reply."""
        with ExitStack() as stack:
            links = [
                stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
                for _ in range(FLOOD_CONNECTIONS)
            ]
            poll = select.epoll()
            stack.callback(poll.close)
            by_number = {link.fileno(): link for link in links}
            self.figures()
            for link in links:
                poll.register(link.fileno(), select.EPOLLIN)
                link.sendall(_PING)
            until = time.monotonic() + FLOOD_S
            while time.monotonic() < until:
                for number, _ in poll.poll():
                    by_number[number].recv(_CHUNK)
                    by_number[number].sendall(_PING)
            return self.figures()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pipe.close()  # the process ends when its pipe is closed
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _run(listener: socket.socket, to_port: int, delay_s: float, pipe: Connection) -> None:
    others: dict[socket.socket, socket.socket] = {}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()  # when due, receiver, chunk; b"" ends a connection
    watched: list[socket.socket | Connection] = [listener, pipe]
    halves: set[socket.socket] = set()  # sockets of which one direction is closed

    def half_close(end: socket.socket) -> None:
        if end in halves:
            halves.remove(end)
            end.close()
        else:
            halves.add(end)

    chunks, since, cpu = 0, time.monotonic(), time.process_time()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(watched, [], [], timeout)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, other, chunk = waiting.popleft()
            try:
                if chunk:
                    other.sendall(chunk)
                    chunks += 1
                else:
                    half_close(other)
                    other.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the receiver has closed its connection
        for one in ready:
            if one is listener:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", to_port))
                for end, other in ((client, server), (server, client)):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    others[end] = other
                    watched.append(end)
            elif isinstance(one, Connection):
                try:
                    one.recv()
                except EOFError:
                    return
                used = time.process_time()
                one.send(Figures(now - since, chunks, used - cpu))
                chunks, since, cpu = 0, now, used
            elif isinstance(one, socket.socket):
                try:
                    chunk = one.recv(_CHUNK)
                except OSError:
                    chunk = b""
                waiting.append((now + delay_s, others[one], chunk))
                if not chunk:
                    watched.remove(one)
                    del others[one]
                    half_close(one)
