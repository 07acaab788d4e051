"""A TCP proxy that misbehaves on purpose, between a client under test and a real server.

    with Proxy(server.port) as proxy:
        client = holdfast.connect(proxy.url)
        proxy.on("acquire", LOSE_REPLY)      # the next acquire is executed, and its reply never comes back

It reads both directions as Redis frames, so a fault is aimed at a request (by the name of its script, or by its
command) and not at a moment, and a test needs no luck to hit it.

A held request stays in the proxy, with all that follows it on its connection, because TCP does not reorder. The proxy
keeps its own connection to the server open even when the client has hung up, as a slow network does, so that
``deliver()`` can let the request arrive long after its sender has given it up.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, Self

import hiredis

from holdfast.lua import SCRIPTS

__all__ = [
    "HOLD",
    "LOSE_REPLY",
    "LOSE_REQUEST",
    "MUTE_REPLY",
    "PASS",
    "SWALLOW_REPLY",
    "SWALLOW_REQUEST",
    "Fault",
    "Proxy",
    "cut_at",
    "delay",
    "dribble",
    "followed_by",
    "instead",
]


class Fault(NamedTuple):
    """What becomes of one request, and of its reply."""

    kind: str
    amount: float = 0.0
    data: bytes = b""


PASS = Fault("pass")
LOSE_REPLY = Fault("lose reply")  # executed; instead of the reply comes a reset
MUTE_REPLY = Fault("mute reply")  # executed; neither this nor a later reply comes, on a connection that stays open
LOSE_REQUEST = Fault("lose request")  # not executed; a reset
HOLD = Fault("hold")  # not executed until deliver()
SWALLOW_REPLY = Fault("swallow reply")  # executed; its reply alone is missing, later ones come
SWALLOW_REQUEST = Fault("swallow request")  # not executed; its reply alone is missing, later ones come


def followed_by(data: bytes) -> Fault:
    """After the reply, in one piece with it, comes something that was not asked for."""
    return Fault("surplus", data=data)


def instead(data: bytes) -> Fault:
    """Executed; these bytes come instead of the reply."""
    return Fault("instead", data=data)


def delay(seconds: float) -> Fault:
    """The reply comes so much later."""
    return Fault("delay", seconds)


def dribble(seconds: float) -> Fault:
    """The reply comes one byte at a time, with so long a pause before each."""
    return Fault("dribble", seconds)


def cut_at(count: int) -> Fault:
    """So many bytes of the reply come, then a reset."""
    return Fault("cut", count)


_NAMES = {script.sha: name for name, script in SCRIPTS.items()} | {
    script.source: name for name, script in SCRIPTS.items()
}


def _name_of(request: list[bytes]) -> str:
    """The script's name for EVALSHA and EVAL, else the command in small letters."""
    command = request[0].decode(errors="replace").lower()
    if command in ("eval", "evalsha"):
        return _NAMES.get(request[1], command)
    return command


def _split(reader: hiredis.Reader, chunk: bytes, pending: bytearray) -> Iterator[tuple[object, bytes]]:
    """The frames that this chunk completes, each as a value and as the bytes that it came in."""
    # Byte by byte is slow, but it is the only way to learn from a parser where a frame ends.
    for position in range(len(chunk)):
        byte = chunk[position : position + 1]
        pending += byte
        reader.feed(byte)
        value = reader.gets()
        if value is not False:
            frame = bytes(pending)
            pending.clear()
            yield value, frame


def _reset(sock: socket.socket) -> None:
    """Close with RST, as a router or a crashed host does, not with a polite FIN."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    _wake(sock)


def _wake(sock: socket.socket) -> None:
    """Closing alone would leave a thread that is reading from it asleep."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class _Link:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, near: socket.socket, far: socket.socket) -> None:
        self._proxy = proxy
        self._near = near
        self._far = far
        self._fates: deque[Fault] = deque()
        self._held: list[bytes] | None = None
        self._lock = threading.Lock()
        self._near_gone = False
        self._mute = False
        self.forgotten = False
        self.threads = [
            threading.Thread(target=target, name="proxy", daemon=True) for target in (self._upwards, self._downwards)
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def _upwards(self) -> None:
        reader, pending = hiredis.Reader(), bytearray()
        try:
            while chunk := self._near.recv(65536):
                for request, frame in _split(reader, chunk, pending):
                    if not self._forward(request, frame):
                        return
        except OSError:
            pass  # it was reset, by either side
        finally:
            self._near_gone = True
            with self._lock:
                if self._held is None:
                    _wake(self._far)

    def _forward(self, request: object, frame: bytes) -> bool:
        assert isinstance(request, list)
        fault = self._proxy._judge(_name_of(request))
        with self._lock:
            if self._held is None and fault.kind == "hold":
                self._held = []
            if self._held is not None:
                self._held.append(frame)
                self._fates.append(PASS)
                self._proxy._note_held()
                return True
            if fault.kind == "lose request":
                _reset(self._near)
                return False
            if fault.kind == "swallow request":
                return True
            if fault.kind != "blackhole" and not self.forgotten:
                self._fates.append(fault)
                self._far.sendall(frame)
        return True

    def deliver(self, timeout: float = 5.0) -> None:
        with self._lock:
            held, self._held = self._held, None
            for frame in held or ():
                with contextlib.suppress(OSError):
                    self._far.sendall(frame)
            if held and self._near_gone:
                # Let the server read and execute all of it before it sees the end of the connection.
                with contextlib.suppress(OSError):
                    self._far.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + timeout
        while held and self._fates and self.threads[1].is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)

    def _downwards(self) -> None:
        reader, pending = hiredis.Reader(), bytearray()
        try:
            while chunk := self._far.recv(65536):
                for value, frame in _split(reader, chunk, pending):
                    if type(value) is hiredis.PushNotification and value[0] != b"subscribe":  # a reply to nothing
                        self._hand_back(frame, PASS)
                        continue
                    # It is taken off only afterwards, so that an empty list means that all is done.
                    goes_on = self._hand_back(frame, self._fates[0] if self._fates else PASS)
                    if self._fates:
                        self._fates.popleft()
                    if not goes_on:
                        return
        except OSError:
            pass  # it was reset, by either side
        finally:
            _wake(self._near)
            _wake(self._far)

    def _hand_back(self, frame: bytes, fate: Fault) -> bool:
        """Whether the connection goes on."""
        if fate.kind == "lose reply":
            _reset(self._near)
            return False
        if fate.kind == "cut":
            self._tell(frame[: int(fate.amount)])
            _reset(self._near)
            return False
        if fate.kind == "dribble":
            for position in range(len(frame)):
                if self._proxy._closing.wait(fate.amount):
                    return False
                self._tell(frame[position : position + 1])
            return True
        if fate.kind == "delay" and self._proxy._closing.wait(fate.amount):
            return False
        if fate.kind == "swallow reply":
            return True
        if fate.kind == "instead":
            frame = fate.data
        # Once a reply is missing none may follow it on this connection, or it would pass for the missing one.
        self._mute = self._mute or self.forgotten or self._proxy._silent or fate.kind == "mute reply"
        if not self._mute:
            self._tell(frame + fate.data if fate.kind == "surplus" else frame)
        return True

    def _tell(self, data: bytes) -> None:
        # A client that has hung up does not matter to what it has asked for and was held.
        with contextlib.suppress(OSError):
            self._near.sendall(data)

    def reset(self) -> None:
        _reset(self._near)
        _wake(self._far)


class Proxy:
    """Listens on a loopback port of its own and passes on what it hears, but for the faults that were asked for."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._faults: dict[str, deque[Fault]] = {}
        self._links: list[_Link] = []
        self._silent = False
        self._refusing = False
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._seen: Counter[str] = Counter()
        self._held = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._accepting = threading.Thread(target=self._accept, name="proxy-accept", daemon=True)
        self._accepting.start()

    def on(self, name: str, fault: Fault, *, times: int = 1, after: int = 0) -> None:
        """The next requests of that name ("*": any) meet with this fault, once so many have passed unharmed."""
        self._faults.setdefault(name, deque()).extend([PASS] * after + [fault] * times)

    def blackhole(self) -> None:
        """From now on nothing gets through in either direction, and nobody is told."""
        self._silent = True

    def forget(self) -> None:
        """As a router that was restarted: nothing more gets through on the connections of now; new ones are well."""
        for link in self._links:
            link.forgotten = True

    def say(self, data: bytes) -> None:
        """Say something on every connection that nothing was asked for."""
        for link in self._links:
            link._tell(data)

    def heal(self) -> None:
        """Everything passes again. What fell into the black hole is gone; what is held stays held."""
        self._silent = self._refusing = False
        self._faults.clear()

    def refuse(self) -> None:
        """Reset all connections, and every new one at once."""
        self._refusing = True
        self.cut()

    def cut(self) -> None:
        """Reset all connections; new ones are welcome."""
        links, self._links = self._links, []
        for link in links:
            link.reset()

    def deliver(self) -> None:
        """Let all held requests arrive, whether or not their senders still wait; returns once they were executed."""
        for link in list(self._links):
            link.deliver()

    def seen(self, name: str) -> int:
        """How many requests of that name have come by."""
        return self._seen[name]

    def await_request(self, name: str, count: int = 1, timeout: float = 10.0) -> None:
        """Wait until so many requests of that name have come by."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._seen[name] >= count, timeout), f"no {name} came by"

    def await_held(self, count: int = 1, timeout: float = 10.0) -> None:
        """Wait until so many requests are held."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._held >= count, timeout), "nothing is held"

    def close(self) -> None:
        self._closing.set()
        _wake(self._listener)
        self._accepting.join(5.0)
        links, self._links = self._links, []
        for link in links:
            link.deliver()
            link.reset()
            for thread in link.threads:
                thread.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _judge(self, name: str) -> Fault:
        with self._changed:
            self._seen[name] += 1
            self._changed.notify_all()
        if self._silent:
            return Fault("blackhole")
        for known in (name, "*"):
            if faults := self._faults.get(known):
                return faults.popleft()
        return PASS

    def _note_held(self) -> None:
        with self._changed:
            self._held += 1
            self._changed.notify_all()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                _reset(near)
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._upstream), timeout=5.0)
            except OSError:
                _reset(near)
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(self, near, far)
            self._links.append(link)  # before it answers: a fault for all connections must find it
            link.start()
