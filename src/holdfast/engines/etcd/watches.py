"""Watches: streams of etcd that report changes of a key, for the waiters and holders of one client.

A watch is a hint. It wakes a waiter, which then asks; or it makes the keeper check a hold. If a watch is lost, a waiter
asks within half a second, and a holder notices at its next renewal.

httpx sends the body of a request before it reads the answer, so a watch cannot be added to an open stream. So each
watched key has its own stream, and each stream has a task. All tasks run in one event loop: that of the client under
asyncio, otherwise that of a daemon thread. There are at most MOST_STREAMS streams. The keeper asks for all waiters
without a stream together (``present``); holders without a stream notice changes at their renewals.

A stream ends with its first event. Later events belong to the next watch, from the revision of the next answer. A
stream also ends if its first revision was compacted, if its member stops, or if its token has expired. That counts as
an event too, but at most once a second: if a server refuses all watches, there is a pause between two requests.

Under gevent there are no streams. The daemon thread would be a greenlet, and its event loop would run in the thread of
the application, where no other event loop could run then: neither that of a second client nor ``asyncio.run()``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import httpx

from holdfast.engines import greenlets
from holdfast.engines.etcd import gateway
from holdfast.engines.etcd.conversation import Members
from holdfast.engines.etcd.transport import aio_transport
from holdfast.protocol.effects import StepFailed
from holdfast.protocol.intents.requests import Unwatch, Watch
from holdfast.protocol.intents.session import Session
from holdfast.protocol.wait.notifications import NotificationRouter

MOST_STREAMS: Final = 200

_PAUSE: Final = 1.0  # seconds between two wake-ups by streams that failed
_TIMEOUTS: Final = {"connect": 5.0, "write": 5.0}  # seconds; a watch may be silent for any time
_LONGEST_LINE: Final = 2**20  # bytes; longer lines are not read, because that would delay other tasks
_OK: Final = 200

_warned: Final[list[bool]] = []  # not empty: it was logged that this process gets no notifications

log = logging.getLogger("holdfast")


class Stream:
    """One watched range of keys, and the tokens that it is watched for."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.tokens: dict[str, Watch] = {watch.token: watch}
        self.task: asyncio.Task[None] | None = None


class Watches:
    """The streams of one client. All methods run in the event loop of the streams."""

    def __init__(
        self, members: Members, session: Session, router: NotificationRouter, now: Callable[[], float]
    ) -> None:
        self._members = members
        self._session = session
        self._router = router
        self._now = now
        self._transport: httpx.AsyncHTTPTransport | None = None
        self._failed_at = float("-inf")
        self.by_key: dict[tuple[str, str, bool], Stream] = {}
        self.by_token: dict[str, Stream] = {}

    def follow(self, request: Watch | Unwatch) -> None:
        if type(request) is Watch:
            self.begin(request)
        else:
            self.end(request.token)

    def begin(self, watch: Watch) -> None:
        """Watch, unless that key is watched for this token already, or there are too many streams."""
        place = watch.key, watch.end, watch.puts
        known = self.by_token.get(watch.token)
        stream = self.by_key.get(place)
        if known is not None and known is stream:
            return
        self.end(watch.token)
        if stream is not None and stream.watch.revision <= watch.revision:
            stream.tokens[watch.token] = watch
        elif len(self.by_key) < MOST_STREAMS and stream is None:
            stream = self.by_key[place] = Stream(watch)
            stream.task = asyncio.get_running_loop().create_task(self._follow(place, stream))
        else:
            return
        self.by_token[watch.token] = stream

    def end(self, token: str) -> None:
        stream = self.by_token.pop(token, None)
        if stream is None:
            return
        stream.tokens.pop(token, None)
        if not stream.tokens and stream.task is not None:
            stream.task.cancel()

    async def _follow(self, place: tuple[str, str, bool], stream: Stream) -> None:
        changed = False
        url = self._members.url
        try:
            changed = await self._read(url, stream.watch)
        except (httpx.HTTPError, StepFailed) as error:  # StepFailed: a file with a certificate was removed meanwhile
            log.debug("a watch at %s ended: %s", self._members.show(url), type(error).__name__)
            self._members.leave(url)
        finally:
            if self.by_key.get(place) is stream:
                del self.by_key[place]
            for token in stream.tokens:
                if self.by_token.get(token) is stream:
                    del self.by_token[token]
        if not changed:
            now = self._now()
            if now < self._failed_at + _PAUSE:
                return
            self._failed_at = now
        for watch in stream.tokens.values():
            self._tell(watch)

    async def _read(self, url: str, watch: Watch) -> bool:
        """Whether an event has come; False if the stream was refused, or has ended without one."""
        if self._transport is None:
            self._transport = aio_transport(self._members.target)
        asked = httpx.Request(
            *("POST", url + gateway.WATCH),
            headers=self._members.headers(),
            content=gateway.write_watch(watch),
            extensions={"timeout": _TIMEOUTS},
        )
        answer = await self._transport.handle_async_request(asked)
        try:
            if answer.status_code != _OK:
                return False
            async for line in _lines(answer):
                if line and not gateway.is_begun(line):
                    return gateway.is_event(line)
            return False
        finally:
            await answer.aclose()

    def _tell(self, watch: Watch) -> None:
        if watch.holder:
            self._router.touched(watch.holder)
        else:
            self._session.call(watch.token)
            self._router.deliver(f"{watch.token} ask 1 0".encode(), self._now())

    async def close(self) -> None:
        tasks = [stream.task for stream in self.by_key.values() if stream.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        if self._transport is not None:
            await self._transport.aclose()


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream, which may end with a line that is too long."""
    assert isinstance(answer.stream, httpx.AsyncByteStream)
    rest = bytearray()
    async for part in answer.stream:
        first, *others = part.split(b"\n")
        rest += first
        for other in others:
            yield bytes(rest)
            rest = bytearray(other)
        if len(rest) > _LONGEST_LINE:
            log.debug("a watch ended: it sent a line of more than %s bytes", _LONGEST_LINE)
            return
    yield bytes(rest)


def _warn_of_greenlets() -> None:
    if not _warned:
        _warned.append(True)
        log.warning(
            "under gevent, clients of etcd get no notifications: a waiter asks every half second, and a holder learns "
            "of a loss at its next renewal"
        )


class WatchThread:
    """The streams of a client whose callers are threads: their event loop runs in a daemon thread."""

    def __init__(
        self, members: Members, session: Session, router: NotificationRouter, now: Callable[[], float]
    ) -> None:
        self._watches = Watches(members, session, router, now)
        self._address = members.target.address
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._begun: set[str] = set()  # tokens with a watch; most tokens have none

    def follow(self, request: Watch | Unwatch) -> None:
        if type(request) is Watch:
            if self._loop is None:
                if greenlets.mark():
                    _warn_of_greenlets()
                    return
                self.start()
            self._begun.add(request.token)
        elif request.token in self._begun:
            self._begun.discard(request.token)
        else:
            return
        self._submit(self._watches.follow, request)

    def _submit(self, function: Callable[..., object], *args: Any) -> None:
        loop = self._loop
        if loop is None or self._closed:
            return
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            pass  # the loop was closed meanwhile

    def start(self) -> None:
        with self._starting:
            if self._loop is not None or self._closed or greenlets.mark():
                return
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._run, args=(loop,), name="holdfast-watches", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread can be started: waiters ask every half second instead
                log.warning("waiters of %s poll, because no thread can be started: %s", self._address, error)
                loop.close()
                return
            self._loop, self._thread = loop, thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(self._watches.close())
        finally:
            loop.close()

    def streams(self) -> int:
        return len(self._watches.by_key)

    def close(self) -> None:
        self._closed = True
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        try:
            loop.call_soon_threadsafe(loop.stop)
        except RuntimeError:
            return
        if thread is not threading.current_thread():
            thread.join(1.0)
