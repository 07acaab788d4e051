"""Sentinel: which server is the primary at the moment.

Every new connection asks the Sentinels, one after the other, until one of them names a primary. Then it checks by ROLE
that the server it has reached is a primary. Nothing is cached: connections are long-lived, and a cached address would
be wrong exactly when it matters, after a failover.

Failovers. The Sentinels number their decisions (the *epoch*). If a client has seen an epoch, it ignores a Sentinel that
still names the primary of an earlier epoch. The exception: most Sentinels name an earlier epoch, because they were set
up again. When the primary has changed, the client drops all connections to other servers, idle or not. An old primary
may still be up but cut off from its Sentinels, and would go on granting locks that the new primary does not know. A
request that was in flight to the old primary has an unknown outcome, whatever the old primary answers, so it never
becomes a hold.

A healthy connection does not show that a failover has happened: the Sentinels may demote an old primary, and close its
connections, as late as ten seconds after they have named a new one. So a client that is in use asks a Sentinel again
every second, before its next step. If no Sentinel answers, the client keeps its connections.

Two cases remain: the first second after a failover, and a client that reaches an old primary but no Sentinel that knows
the new one. ``replicas=`` covers both, because an old primary has no replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias

import redis.exceptions
import redis.sentinel

from holdfast.engines.redis import handshake
from holdfast.engines.redis.failures import why_no_connection
from holdfast.errors import Unavailable, rounded

Endpoint: TypeAlias = tuple[str, int]

_SHORTEST: Final = 0.25  # seconds: each Sentinel gets at least this long to answer, if that much time is left
_RECHECK_AFTER: Final = 1.0  # seconds
_RECHECK_TIMEOUT: Final = 0.25  # seconds; a step waits no longer than this for the answer
_LONGEST_PAUSE: Final = 8.0  # seconds between two rechecks that got no answer
_ADVICE: Final = "See SENTINEL MASTERS there; a failover may be under way"


class Node(NamedTuple):
    """One Sentinel: how to connect to it."""

    address: str
    connection_class: type[Any]
    settings: dict[str, Any]

    def __repr__(self) -> str:
        return f"<Sentinel {self.address}>"  # the settings contain a password

    def connection_settings(self, timeout: float) -> dict[str, Any]:
        return {**self.settings, "socket_timeout": timeout, "socket_connect_timeout": timeout}


class Primary:
    """The primary that a client has found last. All connections of the client share this object."""

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        self.epoch = -1
        self.on_move: list[Callable[[], None]] = []  # called when the primary has changed, by any thread

    def move(self, endpoint: Endpoint, epoch: int) -> None:
        moved = self.endpoint is not None and self.endpoint != endpoint
        self.endpoint, self.epoch = endpoint, epoch
        if moved:
            for drop_others in self.on_move:
                drop_others()


# The state of each primary that a Sentinel watches, by service name; or the error that the request failed with.
_Answer: TypeAlias = "dict[str, Any] | Exception"


class Sentinels:
    """Finds the primary of one service."""

    def __init__(
        self, service: str, nodes: Sequence[Node], *, fewest_others: int = 0, forced_host: str | None = None
    ) -> None:
        self.service = service
        self.primary = Primary()
        self._nodes = list(nodes)  # the Sentinel that named the primary is first, one that is being asked is last
        self._forced_host = forced_host
        self._recheck_at = 0.0
        self._pause = _RECHECK_AFTER
        self._judge = redis.sentinel.Sentinel([], min_other_sentinels=fewest_others)

    def is_primary(self, connection: Any) -> bool:
        """Whether this connection of redis-py leads to the primary that was found last."""
        return self.primary.endpoint in (None, (connection.host, connection.port))

    def is_recheck_due(self) -> bool:
        """Whether a Sentinel should be asked before the next step. True for one caller at a time."""
        if monotonic() < self._recheck_at:
            return False
        self._postpone()
        return self.primary.endpoint is not None  # if there is none yet, the first connection asks anyway

    def _postpone(self) -> None:
        self._recheck_at = monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)  # until a Sentinel answers

    def recheck(self) -> None:
        """Ask whether another server has become the primary. If no Sentinel answers, keep the known one."""
        try:
            self.find(_RECHECK_TIMEOUT)
        except Unavailable:
            pass

    async def recheck_async(self) -> None:
        try:
            await self.find_async(_RECHECK_TIMEOUT)
        except Unavailable:
            pass

    def find(self, timeout: float) -> dict[str, Any]:
        """The host and port of the primary, as settings for a connection."""
        search = self._search(timeout)
        try:
            node, patience = next(search)
            while True:
                answer: _Answer
                try:
                    answer = _ask(node, patience)
                except (OSError, redis.exceptions.RedisError) as error:
                    answer = error
                node, patience = search.send(answer)
        except StopIteration as found:
            return _settings(found.value)

    async def find_async(self, timeout: float) -> dict[str, Any]:
        search = self._search(timeout)
        try:
            node, patience = next(search)
            while True:
                answer: _Answer
                try:
                    answer = await asyncio.wait_for(_ask_async(node, patience), patience)
                except (OSError, redis.exceptions.RedisError) as error:
                    answer = error
                node, patience = search.send(answer)
        except StopIteration as found:
            return _settings(found.value)

    def _search(self, timeout: float) -> Generator[tuple[Node, float], _Answer, Endpoint]:
        """Yields the Sentinel to ask next and its timeout, and receives its answer. Unavailable if none is usable."""
        causes: dict[str, str] = {}
        behind: list[tuple[int, Endpoint, Node]] = []
        nodes = list(self._nodes)
        until, each = monotonic() + timeout, max(_SHORTEST, timeout / len(nodes))
        for node in nodes:
            self._nodes = sorted(self._nodes, key=lambda other: other is node)  # stable; one assignment is atomic
            left = min(each, until - monotonic())
            answer: _Answer = (yield node, left) if left > 0 else TimeoutError()
            state = self._read(answer)
            if state is None:
                causes[f"Sentinel {node.address}"] = self._why_not(answer, max(0.0, left))
                continue
            endpoint = self._forced_host or state["ip"], state["port"]
            epoch = state["config-epoch"]
            if epoch >= self.primary.epoch:
                return self._follow(node, endpoint, epoch)
            behind.append((epoch, endpoint, node))
            causes[f"Sentinel {node.address}"] = f"it names {endpoint[0]}:{endpoint[1]}, which was replaced since"
        if 2 * len(behind) > len(nodes):  # they were set up again, and do not know the earlier epochs
            epoch, endpoint, node = max(behind, key=lambda found: found[0])
            return self._follow(node, endpoint, epoch)
        raise Unavailable(causes, _ADVICE)

    def _follow(self, node: Node, endpoint: Endpoint, epoch: int) -> Endpoint:
        self._nodes = sorted(self._nodes, key=lambda other: other is not node)
        self._pause = _RECHECK_AFTER
        self._recheck_at = monotonic() + _RECHECK_AFTER
        self.primary.move(endpoint, epoch)
        return endpoint

    def _read(self, answer: _Answer) -> dict[str, Any] | None:
        """The state of our primary according to the Sentinel; None if that primary is down or unknown."""
        state = answer.get(self.service) if isinstance(answer, dict) else None
        return state if state and self._judge.check_master_state(state, self.service) else None

    def _why_not(self, answer: _Answer, waited: float) -> str:
        if isinstance(answer, dict):
            if self.service not in answer:
                return f"it knows no service {self.service!r}"
            return f"the primary of {self.service!r} is down, and no other has taken over yet"
        if isinstance(answer, (TimeoutError, redis.exceptions.TimeoutError)):
            return f"it did not answer within {rounded(waited)} s"
        text = str(answer)
        if "NOAUTH" in text or "Authentication required" in text:
            return "it wants a password (sentinel_password= in the URL)"
        if isinstance(answer, redis.exceptions.AuthenticationError) or "WRONGPASS" in text or "NOPERM" in text:
            return "it refused the user or the password (sentinel_username= and sentinel_password= in the URL)"
        if isinstance(answer, redis.exceptions.ResponseError):
            return "it is no Sentinel"
        return why_no_connection(answer, text)[0]

    def check(self, connection: Any) -> None:
        """Raise Unavailable unless the server at the other end is a primary."""
        connection.send_command("ROLE")
        try:
            self._check_role(connection, connection.read_response())
        except redis.exceptions.ResponseError:
            pass  # this user may not use ROLE; a READONLY reply will show that it is a replica

    async def check_async(self, connection: Any) -> None:
        await connection.send_command("ROLE")
        try:
            self._check_role(connection, await connection.read_response())
        except redis.exceptions.ResponseError:
            pass  # as above

    def _check_role(self, connection: Any, role: Any) -> None:
        if not role or role[0] not in (b"master", "master"):
            problem = f"it is a replica, though a Sentinel names it as the primary of {self.service!r}"
        elif not self.is_primary(connection):
            problem = f"another server has become the primary of {self.service!r}"
        else:
            return
        where = f"{connection.host}:{connection.port}"
        raise Unavailable({where: problem}, "A failover may be under way; try again in a moment")


def _settings(endpoint: Endpoint) -> dict[str, Any]:
    return {"host": endpoint[0], "port": endpoint[1]}


def _ask(node: Node, timeout: float) -> dict[str, Any]:
    """The state of each primary that a Sentinel watches.

    The connection is used once, so it cannot be stale, and no forked child inherits it. It does not come from a pool of
    redis-py, because such a pool refuses a new TLS connection on which session tickets wait to be read.
    """
    connection = node.connection_class(**node.connection_settings(timeout))
    try:
        handshake.connect(connection)
        connection.send_command("SENTINEL", "MASTERS")
        return _states_of(connection.read_response())
    finally:
        connection.disconnect()


async def _ask_async(node: Node, timeout: float) -> dict[str, Any]:
    connection = node.connection_class(**node.connection_settings(timeout))
    try:
        await connection.connect()
        await connection.send_command("SENTINEL", "MASTERS")
        return _states_of(await connection.read_response())
    finally:
        await connection.disconnect(nowait=True)


def _states_of(reply: Any) -> dict[str, Any]:
    """A reply to SENTINEL MASTERS, by name of the service, as redis-py's check_master_state wants it."""
    states: dict[str, Any] = {}
    try:
        for fields in reply:
            words = [word.decode() for word in fields]
            state: dict[str, Any] = dict(zip(words[::2], words[1::2], strict=True))
            flags = state["flags"].split(",")
            state.update(is_master="master" in flags, is_sdown="s_down" in flags, is_odown="o_down" in flags)
            for number in ("port", "config-epoch", "num-other-sentinels"):
                state[number] = int(state[number])
            states[state["name"]] = state
    except (TypeError, ValueError, KeyError, AttributeError):
        raise redis.exceptions.ResponseError("not a reply of a Sentinel") from None
    return states
