"""Opens the connections of a shared connection, with RESP3 if the server speaks it.

Only an error reply to HELLO shows that a server does not speak RESP3. If a connection is cut during HELLO, the cause is
unknown: then RESP2 is used, and HELLO is tried again later on a second connection.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import redis.exceptions

from holdfast.engines.redis.blocking.pipelined_connection import PipelinedConnection
from holdfast.engines.redis.failures import log_no_resp3, log_resp3_is_back, refusal
from holdfast.engines.redis.target import Target

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 4.0  # seconds between probes; doubled each time
_PROBE_TIMEOUT: Final = 0.5
_NEVER: Final = float("inf")


@dataclass(slots=True)
class Capabilities:
    """What the server has refused so far. A forked child inherits it."""

    resp3: bool = True
    tracking: bool = True
    logged_no_pubsub: bool = False


class Opener:
    """Opens connections to one server, for one thread."""

    def __init__(self, target: Target, capabilities: Capabilities) -> None:
        self._target = target
        self._capabilities = capabilities
        self._opening: Any = None  # redis-py's connection during the handshake
        self.probe_at = _NEVER  # when to try RESP3 again, after a connection was cut during HELLO
        self._pause = _FIRST_PAUSE
        self._logged = False  # the log says that RESP3 and tracking are off

    def open(self, timeout: float, *, subscriber: bool) -> PipelinedConnection:
        """A connection with RESP3; else one with RESP2, for notifications if ``subscriber``, for steps if not."""
        if self._capabilities.resp3:
            try:
                return self._open(timeout, resp3=True, subscriber=True)
            except (redis.exceptions.ResponseError, redis.exceptions.ConnectionError) as refused:
                if isinstance(refused.__context__, OSError) or self._is_passing(refused):
                    raise  # it cannot connect at all, or not at the moment
                # HELLO was refused, or the connection was cut. Any other problem occurs again in the next attempt.
                connection = self._open(timeout, resp3=False, subscriber=subscriber)
                self._capabilities.resp3 = not isinstance(refused, redis.exceptions.ResponseError)
                if self._capabilities.resp3:
                    self.probe_at = time.monotonic() + self._pause
                return connection
        return self._open(timeout, resp3=False, subscriber=subscriber)

    def _open(self, timeout: float, *, resp3: bool, subscriber: bool) -> PipelinedConnection:
        extra, left = self._target.prepared(timeout)
        self._opening = self._target.connection(left, {**extra, "protocol": 3} if resp3 else extra)
        self._target.connect(self._opening)
        return PipelinedConnection(self._opening, resp3=resp3, subscriber=subscriber)

    def _is_passing(self, error: Exception) -> bool:
        return refusal(error, self._target.address).retry

    def probe(self, *, needed: bool) -> PipelinedConnection | None:
        """A connection with RESP3, or None if it is not needed or the server still does not answer HELLO."""
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self.probe_at = time.monotonic() + (self._pause if needed else _LONGEST_PAUSE)
        if not needed:
            return None
        try:
            return self._open(_PROBE_TIMEOUT, resp3=True, subscriber=True)
        except Exception as error:  # from redis-py, a credential provider, a custom connect function
            if isinstance(error, redis.exceptions.ResponseError) and not self._is_passing(error):
                self._capabilities.resp3, self.probe_at = False, _NEVER
            elif not self._logged:
                self._logged = True
                log_no_resp3(f"connections to {self._target.address} were cut during HELLO")
            return None

    def note_installed(self, connection: PipelinedConnection) -> None:
        """Record that the connection is in use. From now on its socket does not belong to the opener."""
        self._opening = None
        if connection.resp3:
            self.probe_at, self._pause = _NEVER, _FIRST_PAUSE
            if self._logged:
                self._logged = False
                log_resp3_is_back(self._target.address)

    def forget(self) -> None:
        """In a forked child: close our copy of a socket that was being opened."""
        sock = getattr(self._opening, "_sock", None)
        if sock is not None:
            sock.close()
