"""An in-memory model of etcd, as far as locks need it. Its owner moves its clock.

It has the interface of ``store.Store``, so a search can use either. A command is ``etcd <request> <channel>``; the
request is one of protocol/intents/requests.py: a transaction, a lease that is granted or renewed, or a watch. A watch
sends ``token ask 1 0`` to the channel of its client when its keys change; if they have changed since its revision, at
once. Members are not modelled: a client sees a change of leader as a request that is late, or gets no answer.

What matters for a lock on etcd:

- Each write has its own revision, and a key remembers the revision of its creation.
- A lease of n seconds ends no earlier than n seconds after its last renewal. All its keys are deleted at one revision.
- If a request names a lease that has ended, the request fails and changes nothing.
- In this model, a watch does not report keys that are deleted because their lease has ended. A watch may be lost
  anyway, so nothing may depend on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.lab.servers.store import START_US
from holdfast.protocol.intents.requests import (
    Compare,
    Created,
    Delete,
    Found,
    Get,
    GrantLease,
    Item,
    KeepLease,
    LeaseLife,
    Older,
    Operation,
    Put,
    ReadLease,
    Txn,
    TxnResult,
    Unwatch,
    Watch,
)

LEASE_UNKNOWN = b"requested lease not found"


@dataclass(frozen=True)
class Reply:
    """The answer of etcd. It is not a tuple, because a search takes a tuple for the reply of a script."""

    result: Any


@dataclass(frozen=True)
class Refused:
    """An error reply of etcd to a request that it has executed."""

    message: str = "etcdserver: mvcc: database space exceeded"


class _Decided(NamedTuple):
    """A transaction whose compares, also those of transactions within it, were decided before anything is done."""

    succeeded: bool
    operations: tuple[Operation | _Decided, ...]

    def puts(self) -> Iterator[Put]:
        for one in self.operations:
            if type(one) is _Decided:
                yield from one.puts()
            elif type(one) is Put:
                yield one


class Etcd:
    """One cluster of etcd. All its members always agree."""

    refusal = Refused()  # its answer to a request that it executes, and then refuses

    def __init__(self, now_us: int = START_US) -> None:
        self._now_us = now_us
        self.items: dict[str, Item] = {}
        self.revision = 1
        self.leases: dict[int, tuple[int, int]] = {}  # by id: its length in seconds, and when it ends
        self.last_lease = 0
        self.watches: frozenset[tuple[str, Watch]] = frozenset()  # by channel
        self.outbox: list[tuple[bytes, bytes]] = []
        self.written: set[bytes] = set()
        self.subscribed: frozenset[bytes] = frozenset()
        self.connections: dict[Hashable, object] = {}

    @property
    def now_us(self) -> int:
        return self._now_us

    @now_us.setter
    def now_us(self, now_us: int) -> None:
        self._now_us = now_us
        for lease, (_, ends_us) in sorted(self.leases.items()):
            if ends_us <= now_us:
                del self.leases[lease]
                bound = [key for key, item in self.items.items() if item.lease == lease]
                self.revision += bool(bound)
                for key in bound:
                    del self.items[key]

    # What a search reads.

    @property
    def values(self) -> dict[bytes, bytes]:
        return {key.encode(): item.value.encode() for key, item in self.items.items()}

    @property
    def deadlines(self) -> dict[bytes, int]:
        """The last millisecond of each key that is bound to a lease."""
        return {key.encode(): self.leases[item.lease][1] // 1000 - 1 for key, item in self.items.items() if item.lease}

    def execute(self, *words: Any) -> Any:
        """Execute one request. Returns its Reply, or LEASE_UNKNOWN."""
        _, request, channel = words
        result = self._carry_out(request, channel)
        return result if result == LEASE_UNKNOWN else Reply(result)

    def _carry_out(self, request: Any, channel: str) -> Any:
        if type(request) is Watch:
            return self._watch(request, channel)
        if type(request) is Unwatch:
            self.watches = frozenset(pair for pair in self.watches if pair[1].token != request.token)
            return None
        if type(request) is GrantLease:
            self.last_lease += 1
            self.leases[self.last_lease] = request.seconds, self._now_us + request.seconds * 1_000_000
            return LeaseLife(self.last_lease, request.seconds)
        if type(request) is KeepLease:
            seconds, _ = self.leases.get(request.lease, (0, 0))
            if seconds:
                self.leases[request.lease] = seconds, self._now_us + seconds * 1_000_000
            return LeaseLife(request.lease, seconds)
        if type(request) is ReadLease:
            _, ends_us = self.leases.get(request.lease, (0, self._now_us))
            return LeaseLife(request.lease, (ends_us - self._now_us) // 1_000_000)
        assert type(request) is Txn
        return self._txn(request)

    def _txn(self, txn: Txn) -> Any:
        decided = self._decide(txn)
        if any(put.lease and put.lease not in self.leases for put in decided.puts()):
            return LEASE_UNKNOWN
        changed = set[str]()
        done: TxnResult = self._perform(decided, self.revision + 1, changed)
        if changed:
            self.revision += 1
            self._tell(changed)
        return done._replace(revision=self.revision)

    def _decide(self, txn: Txn) -> _Decided:
        succeeded = all(map(self._holds, txn.compares))
        operations = txn.then if succeeded else txn.otherwise
        return _Decided(succeeded, tuple(self._decide(one) if type(one) is Txn else one for one in operations))

    def _holds(self, compare: Compare) -> bool:
        if type(compare) is Older:
            found = [item for key, item in self.items.items() if compare.key <= key < compare.end]
            return all(item.created < compare.revision for item in found)
        if type(compare) is Created and compare.end:
            found = [item for key, item in self.items.items() if compare.key <= key < compare.end]
            return all(item.created == compare.revision for item in found)
        item = self.items.get(compare.key)
        if item is None:
            return compare.revision == 0
        return compare.revision == (item.created if type(compare) is Created else item.modified)

    def _perform(self, operation: Operation | _Decided, revision: int, changed: set[str]) -> Any:
        if type(operation) is Put:
            old = self.items.get(operation.key)
            created = revision if old is None else old.created
            self.items[operation.key] = Item(operation.key, operation.value, created, revision, operation.lease)
            changed.add(operation.key)
            return None
        if type(operation) is Delete:
            there = self.items.pop(operation.key, None)
            if there is not None:
                changed.add(operation.key)
            return int(there is not None)
        if type(operation) is _Decided:
            results = tuple(self._perform(one, revision, changed) for one in operation.operations)
            return TxnResult(operation.succeeded, revision, results)
        assert type(operation) is Get
        if not operation.end:
            return Found(*((self.items[operation.key],), 1) if operation.key in self.items else ((), 0))
        found = [item for key, item in self.items.items() if operation.key <= key < operation.end]
        items = [item for item in found if not operation.created_before or item.created < operation.created_before]
        order = (lambda item: item.key) if operation.keys_only else (lambda item: (item.created, item.key))
        items.sort(key=order, reverse=operation.newest_first)
        return Found(tuple(items[: operation.limit or None]), len(found))

    # Watches.

    def _watch(self, watch: Watch, channel: str) -> None:
        self.subscribed |= {channel.encode()}
        self.watches = frozenset(pair for pair in self.watches if pair[1].token != watch.token)
        there = [item for key, item in self.items.items() if _covers(watch, key)]
        if not there or (watch.puts and any(item.modified >= watch.revision for item in there)):
            self._send(channel, watch)  # a key has changed since the revision of the watch
        else:
            self.watches |= {(channel, watch)}

    def _tell(self, changed: set[str]) -> None:
        for channel, watch in sorted(self.watches):
            if any(_covers(watch, key) and (watch.puts or key not in self.items) for key in changed):
                self.watches -= {(channel, watch)}
                self._send(channel, watch)

    def _send(self, channel: str, watch: Watch) -> None:
        self.outbox.append((channel.encode(), f"{watch.token} ask 1 0".encode()))

    def remove(self, key: bytes) -> bool:
        """Delete a key by hand."""
        there = self.items.pop(key.decode(), None) is not None
        self.revision += there
        return there

    def copy(self) -> Etcd:
        """A cluster that behaves the same and shares nothing that can change."""
        twin = Etcd(self._now_us)
        twin.items, twin.leases = self.items.copy(), self.leases.copy()
        twin.revision, twin.last_lease, twin.watches = self.revision, self.last_lease, self.watches
        twin.outbox, twin.written = self.outbox.copy(), self.written.copy()
        twin.subscribed = self.subscribed
        return twin

    def fingerprint(self) -> Hashable:
        """Equal for clusters that behave the same from now on."""
        return (
            frozenset(self.items.values()),
            frozenset((lease, seconds, ends - self._now_us) for lease, (seconds, ends) in self.leases.items()),
            *(self.revision, self.last_lease, self.watches, self.subscribed),
        )


def _covers(watch: Watch, key: str) -> bool:
    return watch.key <= key < watch.end if watch.end else key == watch.key
