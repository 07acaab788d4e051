"""Transports of httpx whose requests end at a deadline, and whose replies have a limit.

A timeout of httpx counts from the last byte, so a server that sends one byte now and then would never be given up. So
a request gets a ``Deadline`` as its timeout. httpcore passes it on to each read and write of its connection, and the
streams here wait only for what is left of it. That costs no thread and no timer of its own.

The body is read as it was sent: no ``Content-Encoding`` is asked for, and a small body cannot become a large one.
"""

from __future__ import annotations

import asyncio
import importlib
import ssl
from collections.abc import Iterable
from time import monotonic
from typing import Any, Final

import httpcore
import httpx

from holdfast.engines.etcd.target import EtcdTarget
from holdfast.engines.handshake import close_sockets_of
from holdfast.engines.redis.protocol import LONGEST_REPLY

# Otherwise httpcore imports these with the first asynchronous request. That takes longer than a short ttl; and for
# clients with threads it would happen in the thread of the watches, where a fork could come in the middle of it.
for _module in ("anyio._backends._asyncio", "httpcore._backends.anyio"):
    importlib.import_module(_module)

_MOMENT: Final = 0.001  # seconds


class ReplyTooLong(httpx.RemoteProtocolError):
    """A reply is longer than LONGEST_REPLY."""


class Deadline(float):
    """A timeout in seconds, and the time at which it ends."""

    __slots__ = ("_is_over", "_until")
    _is_over: bool
    _until: float

    def __new__(cls, seconds: float) -> Deadline:
        deadline = super().__new__(cls, seconds)
        deadline._until = monotonic() + seconds
        deadline._is_over = False
        return deadline

    def left(self) -> float:
        """The seconds until its end. The first call after its end gets a moment: the reply may be there already."""
        left = self._until - monotonic()
        if left <= 0 and not self._is_over:
            self._is_over = True
            return _MOMENT
        return left


def _left(timeout: float | None, error: type[Exception]) -> float | None:
    if type(timeout) is not Deadline:
        return timeout
    left = timeout.left()
    if left <= 0:
        raise error("the deadline has passed")
    return left


class _Stream(httpcore.NetworkStream):
    """A connection. It uses the socket itself, because a write of httpcore also counts from the last byte."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner
        self._socket = inner.get_extra_info("socket")

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            self._socket.settimeout(_left(timeout, httpcore.ReadTimeout))
            data: bytes = self._socket.recv(max_bytes)
            return data
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            while buffer:
                self._socket.settimeout(_left(timeout, httpcore.WriteTimeout))
                buffer = buffer[self._socket.send(buffer) :]
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = _left(timeout, httpcore.ConnectTimeout)
        try:
            return _Stream(self._inner.start_tls(ssl_context, server_hostname, left))
        except BaseException as error:
            close_sockets_of(error)
            raise

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.NetworkBackend):
    def __init__(self, inner: httpcore.NetworkBackend) -> None:
        self._inner = inner

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(self._inner.connect_tcp(host, port, timeout, local_address, socket_options))


class _AioStream(httpcore.AsyncNetworkStream):
    """A connection. anyio lets an ssl.SSLError pass: a server that wants a client certificate refuses us only after
    the handshake."""

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return await self._inner.read(max_bytes, _left(timeout, httpcore.ReadTimeout))
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            await self._inner.write(buffer, _left(timeout, httpcore.WriteTimeout))
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        left = _left(timeout, httpcore.ConnectTimeout)
        try:
            return _AioStream(await self._inner.start_tls(ssl_context, server_hostname, left))
        except asyncio.CancelledError:  # httpcore closes the connection only after an Exception
            await self._inner.aclose()
            raise

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _AioBackend(httpcore.AsyncNetworkBackend):
    def __init__(self, inner: httpcore.AsyncNetworkBackend) -> None:
        self._inner = inner

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _AioStream(await self._inner.connect_tcp(host, port, timeout, local_address, socket_options))


def blocking_transport(target: EtcdTarget) -> httpx.HTTPTransport:
    transport = httpx.HTTPTransport(**target.settings())
    pool: Any = transport._pool  # httpx has no option for the network backend of httpcore
    pool._network_backend = _Backend(pool._network_backend)
    return transport


def aio_transport(target: EtcdTarget) -> httpx.AsyncHTTPTransport:
    transport = httpx.AsyncHTTPTransport(**target.settings())
    pool: Any = transport._pool
    pool._network_backend = _AioBackend(pool._network_backend)
    return transport


def read_body(answer: httpx.Response) -> bytearray:
    """The body of an answer. ReplyTooLong if it is longer than LONGEST_REPLY."""
    body = bytearray()
    assert isinstance(answer.stream, httpx.SyncByteStream)
    for part in answer.stream:
        body += part
        if len(body) > LONGEST_REPLY:
            raise ReplyTooLong(f"more than {LONGEST_REPLY} bytes")
    return body


async def aread_body(answer: httpx.Response) -> bytearray:
    """As ``read_body``."""
    body = bytearray()
    assert isinstance(answer.stream, httpx.AsyncByteStream)
    async for part in answer.stream:
        body += part
        if len(body) > LONGEST_REPLY:
            raise ReplyTooLong(f"more than {LONGEST_REPLY} bytes")
    return body
