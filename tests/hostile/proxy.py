"""A TCP proxy that can garble every reply, for many connections at once: all proxies of a process share one event loop.

tests/proxy.py aims a fault at one request; this one has faults that last, chosen by a seed. Bytes that fell into a
black hole never come back: the connection stays silent for good, as after a router that has forgotten it. Bytes that
are stalled arrive late, whether or not their sender still waits, as after a partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any

from tests.hostile.garble import Piece, frames_of

__all__ = ["Proxy", "as_it_comes", "worst_lag_since"]


BEAT = 0.02

_loop: list[asyncio.AbstractEventLoop] = []
_starting = threading.Lock()
_lags: deque[tuple[float, float]] = deque(maxlen=10_000)  # when, and by how much, a beat of the loop was late


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="hostile-proxy", daemon=True).start()
    loop.call_soon_threadsafe(_beat, loop, loop.time())
    return loop


def _beat(loop: asyncio.AbstractEventLoop, due: float) -> None:
    _lags.append((monotonic(), loop.time() - due))
    loop.call_later(BEAT, _beat, loop, loop.time() + BEAT)


def worst_lag_since(moment: float) -> float:
    """By how much the proxies of this process were late, at worst: a slow proxy looks like a slow client."""
    return max((lag for at, lag in list(_lags) if at >= moment), default=0.0)


def as_it_comes(buffer: bytearray) -> list[bytes]:
    """All that is in the buffer, for what is no RESP."""
    taken = bytes(buffer)
    buffer.clear()
    return [taken]


class Proxy:
    """Listens on a loopback port of its own. All methods may be called from any thread.

    ``frames`` takes the complete replies out of a buffer; ``rewrite`` says what the client gets instead of one.
    """

    def __init__(
        self,
        upstream: int,
        *,
        frames: Callable[[bytearray], list[bytes]] = frames_of,
        rewrite: Callable[[bytes], bytes] | None = None,
    ) -> None:
        with _starting:
            if not _loop:
                _loop.append(_start_loop())
        self._upstream = upstream
        self.frames, self.rewrite = frames, rewrite
        self.open = asyncio.Event()
        self.open.set()
        self._stalls = 0
        self._links: set[_Link] = set()
        self._silent = False
        self._refusing = False
        self.garbler: Callable[[bytes], Sequence[Piece]] | None = None
        self.latency = 0.0
        self.requests = 0
        self._server: asyncio.Server = self._run(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"

    @property
    def connections(self) -> list[str]:
        """The open connections, by the address at which the server knows them."""
        return ["{}:{}".format(*link.far_address) for link in list(self._links)]

    def cut(self) -> None:
        """Reset all connections; new ones are welcome."""
        self._run(self._cut())

    def refuse(self) -> None:
        """Reset all connections, and every new one at once."""
        self._refusing = True
        self.cut()

    def black_hole(self) -> None:
        """Nothing gets through on the connections of now, nor on those that are made before ``heal``."""
        self._silent = True
        self._run(self._mute())

    def stall(self) -> None:
        """Nothing gets through, on any connection, until ``resume`` is called as often; then all of it does."""
        _loop[0].call_soon_threadsafe(self._stall, 1)

    def resume(self) -> None:
        _loop[0].call_soon_threadsafe(self._stall, -1)

    def _stall(self, more: int) -> None:
        self._stalls += more
        self.open.clear() if self._stalls else self.open.set()

    def heal(self) -> None:
        """Everything passes again, on new connections and on those that were not muted."""
        self._silent = self._refusing = False
        self.garbler = None
        self.latency = 0.0

    def close(self) -> None:
        self._run(self._close())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, _loop[0]).result(10.0)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=512)

    async def _cut(self) -> None:
        for link in list(self._links):
            link.reset()

    async def _mute(self) -> None:
        for link in self._links:
            link.silent = True

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        tasks = [task for link in list(self._links) for task in link.tasks]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            _reset(writer)
            return
        link = _Link(self, (reader, writer), (far_reader, far_writer))
        link.silent = self._silent
        self._links.add(link)
        try:
            await asyncio.wait(link.tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            link.reset()
            await asyncio.gather(*link.tasks, return_exceptions=True)
            self._links.discard(link)


class _Link:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(
        self,
        proxy: Proxy,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy = proxy
        self._near, self._far = near, far
        self.far_address: tuple[str, int] = far[1].get_extra_info("sockname")
        self.silent = False
        self.tasks = [asyncio.ensure_future(self._upwards()), asyncio.ensure_future(self._downwards())]

    def reset(self) -> None:
        for task in self.tasks:
            task.cancel()
        _reset(self._near[1])
        self._far[1].close()

    async def _upwards(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := await self._near[0].read(65536):
                self._proxy.requests += chunk.count(b"\r\n*") + chunk.startswith(b"*")
                await self._proxy.open.wait()
                if not self.silent and not self._far[1].is_closing():
                    self._far[1].write(chunk)

    async def _downwards(self) -> None:
        buffer = bytearray()
        with contextlib.suppress(OSError):
            while chunk := await self._far[0].read(65536):
                buffer += chunk
                await self._proxy.open.wait()
                for frame in self._proxy.frames(buffer):
                    if not await self._hand_back(frame):
                        return

    async def _hand_back(self, frame: bytes) -> bool:
        """Whether the connection goes on."""
        garbler = self._proxy.garbler
        if self._proxy.rewrite is not None:
            frame = self._proxy.rewrite(frame)
        if self._proxy.latency:
            await asyncio.sleep(self._proxy.latency)
        for piece in (frame,) if garbler is None else garbler(frame):
            if piece is None:
                return False
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            elif not self.silent and not self._near[1].is_closing():
                self._near[1].write(piece)
        return True


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a router or a crashed host does."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
