"""Sentinel: which server is the primary at the moment.

Every new connection asks the Sentinels, one after the other, until one knows a primary, and then checks by ROLE that
the server it has reached is one. Nothing is cached: connections are long-lived, and a cached address would be wrong
exactly when it matters.

Failovers. The Sentinels number their decisions (the *epoch*). A client that has seen an epoch follows no Sentinel that
still names the primary of an earlier one, unless most Sentinels do, as after they were set up anew. When the primary
has changed, all connections to other servers are dropped, idle or not: an old primary may be up still, cut off from
its Sentinels, and would go on granting locks that the new one knows nothing of. What was under way there has an
unknown outcome, whatever the old primary answers, so it never becomes a hold.

Connections that are in order say nothing of a failover: the Sentinels may demote an old primary, and cut its
connections, ten seconds after they have named a new one. So a client that is in use asks a Sentinel again every second,
before its next step. If none answers, it goes on with what it has.

What remains: a second after a failover, and a client that reaches an old primary but no Sentinel that knows better.
``replicas=`` covers both, since an old primary has no replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias

import redis.exceptions
import redis.sentinel

from holdfast.engines.redis.failures import why_no_connection
from holdfast.errors import Unavailable, rounded

Endpoint: TypeAlias = tuple[str, int]

_SHORTEST: Final = 0.25  # seconds that each Sentinel has for its answer, if there is as much
_RECHECK_AFTER: Final = 1.0  # seconds
_RECHECK_TIMEOUT: Final = 0.25  # a step waits that long at most
_LONGEST_PAUSE: Final = 8.0  # between two rechecks that got no answer
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
    """The primary that one client has found last. All its connections share this."""

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


# What a Sentinel says of its primaries, by name; or why it says nothing.
_Answer: TypeAlias = "dict[str, Any] | Exception"


class Sentinels:
    """Finds the primary of one service."""

    def __init__(
        self, service: str, nodes: Sequence[Node], *, fewest_others: int = 0, forced_host: str | None = None
    ) -> None:
        self.service = service
        self.primary = Primary()
        self._nodes = list(nodes)  # the one that named the primary comes first, one that is being asked last
        self._forced_host = forced_host
        self._recheck_at = 0.0
        self._pause = _RECHECK_AFTER
        self._judge = redis.sentinel.Sentinel([], min_other_sentinels=fewest_others)

    def is_primary(self, connection: Any) -> bool:
        """Whether this connection, of redis-py, leads to the primary that was found last."""
        return self.primary.endpoint in (None, (connection.host, connection.port))

    def is_recheck_due(self) -> bool:
        """Whether a Sentinel should be asked before the next step. True for one caller at a time."""
        if monotonic() < self._recheck_at:
            return False
        self._postpone()
        return self.primary.endpoint is not None  # else the first connection asks anyway

    def _postpone(self) -> None:
        self._recheck_at = monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)  # until a Sentinel answers

    def recheck(self) -> None:
        """Ask whether another server has become the primary. If no Sentinel answers, that stays unknown."""
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
        """Where the primary is: settings for a connection to it."""
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
        """Yields the Sentinel to ask next, and for how long; is sent its answer. Unavailable if no answer will do."""
        causes: dict[str, str] = {}
        behind: list[tuple[int, Endpoint, Node]] = []
        nodes = list(self._nodes)
        until, each = monotonic() + timeout, max(_SHORTEST, timeout / len(nodes))
        for node in nodes:
            self._nodes = sorted(self._nodes, key=lambda other: other is node)  # stable, and one assignment for threads
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
        if 2 * len(behind) > len(nodes):  # set up anew: none of them remembers the epochs of before
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
        """What the Sentinel knows of our primary, if that is up."""
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
            pass  # this user may not ask; then a READONLY reply tells

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

    The connection serves this once: it cannot be stale, and no forked child inherits it. It is not taken from a pool of
    redis-py, which refuses a new TLS connection on which session tickets wait to be read.
    """
    connection = node.connection_class(**node.connection_settings(timeout))
    try:
        connection.connect()
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
