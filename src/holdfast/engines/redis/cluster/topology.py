"""Which node of a cluster serves which slot, and where channels are subscribed to. Both faces share this module.

The map of slots is a hint. Every node knows its own slots, and refuses a step for another slot before the step runs. So
a wrong map costs time, but never safety. These interleavings decide how the map is kept:

- MOVED: the step did not run, so it is sent again, to the node that the reply names. The map is corrected for that slot
  at once; the whole map is read soon after, because slots rarely move alone.
- A map older than the MOVED: CLUSTER SLOTS may be answered by a node that does not know of the change yet. Then the
  next step for that slot is redirected once more. MOST_REDIRECTIONS limits this, and also two nodes that name each
  other: after that the step fails, unsent, and the protocol tries again after a pause.
- ASK: the slot is moving, and this key has moved. Only this step goes to the other node: after ASKING on the same
  connection, and with the source of its script, because that node may not know the script. The map does not change.
- TRYAGAIN: the slot is moving, and only some of the step's keys have moved. The step did not run; the protocol tries
  again. Every lock has keys that do not exist, so most steps get this answer until the slot has moved. A renewal uses
  one key only, so a holder keeps its lease meanwhile.
- A lost reply, then MOVED: the step may have run on the old node, and its keys may have moved since, or were lost in a
  failover. The engine reports the lost reply; the protocol sends the step again with the same token, as it does on a
  single server, and every step is idempotent by its token.
- An old primary that is cut off accepts writes until it notices (cluster-node-timeout). These writes are lost. This is
  the limit of asynchronous replication that docs/guarantees.md states; the fence protects the guarded resource.
- A node that is gone: connecting fails or times out. The map is read from another node, at most every REFRESH_EVERY.
- A new client in a process that has used this cluster before *assumes* the map that was read last, until a node has
  answered it. If its first step fails instead, it reads the map, as the first client did.

Channels. The client subscribes to a slot's channel on the slot's node. If the slot moves, the server ends the
subscription (``sunsubscribe``). After the next map, the client subscribes on the new node, in the background; then all
waiters look again. A waiter that asks meanwhile keeps its place in the queue, without a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Final, Generic, Protocol, TypeVar

from holdfast.engines.redis.channels import ShardChannels
from holdfast.engines.redis.cluster.redirection import Address, Redirection
from holdfast.engines.redis.target import Target
from holdfast.names import SLOTS, slot_of, tag_of
from holdfast.protocol.effects import Command, Step
from holdfast.protocol.wait.notifications import NotificationRouter
from holdfast.protocol.wait.waiting import NO_CHANNEL

MOST_REDIRECTIONS: Final = 5
REFRESH_EVERY: Final = 0.1  # least seconds between two reads of the map
LONGEST_ASK: Final = 1.0  # seconds that one node has to answer CLUSTER SLOTS
_KEEP_ABSENT: Final = 60.0  # seconds after which a node without slots is closed

Ranges = list[tuple[int, int, Address]]  # first slot, last slot, primary
_MOST_REMEMBERED: Final = 16
_remembered: Final[dict[tuple[Address, ...], Ranges]] = {}  # the map that this process has read last, by seeds


class Node(Protocol):
    """One node of a cluster, with the engines of a single server."""

    address: Address
    channels: ShardChannels
    failed_at: float  # when it last failed; 0: never
    absent_since: float | None  # since when it has been missing in the map; None if it is there

    def resubscribe(self) -> None: ...
    def trust(self) -> None: ...
    def retire(self) -> None: ...


N = TypeVar("N", bound=Node)


class Topology(Generic[N]):
    """The nodes of one cluster, by slot. Any thread may read it; each change is one atomic operation."""

    def __init__(
        self,
        target: Target,
        router: NotificationRouter,
        now: Callable[[], float],
        new_node: Callable[[Topology[N], Address], N],
    ) -> None:
        self.target = target
        self.router = router
        self.now = now
        self._new_node = new_node
        self.nodes: dict[Address, N] = {}
        self.owners: list[N | None] = [None] * SLOTS
        self.known = False  # whether a node has sent us the map, or has answered a step that used an assumed map
        self.stale = True  # whether to read the map; a map that is neither stale nor known is an assumed one
        self.refresh_at = 0.0  # the map is not read before this time
        self._channels: dict[int, str] = {}  # by slot
        router.shards = self
        router.crowd.slot_of = slot_of
        router.registry.contacts.node_of = self.primary_of
        for address in target.seeds:
            self.node_at(address)
        if remembered := _remembered.get(target.seeds):
            self.owners, self.stale = self._owners_in(remembered), False

    def node_at(self, address: Address) -> N:
        node = self.nodes.get(address)
        if node is None:
            node = self.nodes.setdefault(address, self._new_node(self, address))
            if self.known:
                node.trust()
        return node

    def primary_of(self, key: str) -> str:
        """The address of the node that has this key; empty if none is known."""
        node = self.owners[slot_of(key)]
        return "" if node is None else "{}:{}".format(*node.address)

    def note_part(self, part: Step | Command, reply: object, sent_at: float) -> None:
        """A part of a step on several nodes was served."""
        self.router.registry.contacts.note_reply(part, reply, sent_at, self.now())

    def _remapped(self, address: Address) -> Address:
        return address if self.target.remap is None else self.target.remap(address)

    # The map.

    def is_current(self) -> bool:
        """Whether the map is not assumed, and need not be read again."""
        return self.known and not self.stale

    def is_due(self) -> bool:
        """Whether to read the map now. If so, it is not due again for REFRESH_EVERY."""
        now = monotonic()
        if self.known and now < self.refresh_at:
            return False
        self.refresh_at = now + REFRESH_EVERY
        return True

    def candidates(self) -> list[N]:
        """The nodes to ask for the map, in this order: the node that failed last comes last."""
        return sorted(self.nodes.values(), key=lambda node: node.failed_at)

    def install(self, ranges: Ranges) -> None:
        """Use a map that was just read."""
        self.owners = self._owners_in(ranges)
        self.confirm()
        self.stale = False
        self._move_channels()
        present = {self._remapped(address) for _, _, address in ranges}
        self._retire_absent(present)
        self.router.registry.contacts.keep_only(["{}:{}".format(*address) for address in present])
        _remembered[self.target.seeds] = ranges
        while len(_remembered) > _MOST_REMEMBERED:
            _remembered.pop(next(iter(_remembered)), None)

    def _owners_in(self, ranges: Ranges) -> list[N | None]:
        owners: list[N | None] = [None] * SLOTS
        for first, last, address in ranges:
            owners[first : last + 1] = [self.node_at(self._remapped(address))] * (last + 1 - first)
        return owners

    def confirm(self) -> None:
        """Record that a node has answered: the map is valid. A node that cannot be reached now may be reached later."""
        self.known = True
        for node in list(self.nodes.values()):
            node.trust()

    def follow(self, redirection: Redirection) -> N:
        """The node to which a step was redirected. MOVED also corrects the map."""
        node = self.node_at(self._remapped(redirection.address))
        if not redirection.asking:
            self.owners[redirection.slot] = node
            self.stale = True
            self._move_channels()
        return node

    def note_failure(self, node: N) -> None:
        """Record that a node could not be used. The map is read again, from another node first."""
        node.failed_at = monotonic()
        self.stale = True

    def note_moved(self) -> None:
        """Record that a slot has moved. Its waiters ask again, which also reads the map."""
        self.stale = True
        self.router.look_again()

    def _retire_absent(self, present: set[Address]) -> None:
        now = monotonic()
        for address, node in list(self.nodes.items()):
            if address in present or address in self.target.seeds:
                node.absent_since = None
            elif node.absent_since is None:
                node.absent_since = now
            elif now - node.absent_since > _KEEP_ABSENT:
                self.nodes.pop(address, None)
                node.retire()

    # Channels.

    def channel_of(self, keys: tuple[str, ...]) -> str:
        """The channel of the first key, if the channels of all keys are subscribed to; else ""."""
        for key in keys[1:]:
            if self.channel_in(slot_of(key)) == NO_CHANNEL:
                return ""
        slot = slot_of(keys[0])
        owner = self.owners[slot]
        return owner.channels.armed.get(slot, "") if owner is not None else ""

    def channel_in(self, slot: int) -> str:
        """The channel of this slot, or NO_CHANNEL if it is not subscribed to."""
        owner = self.owners[slot]
        return owner.channels.armed.get(slot, NO_CHANNEL) if owner is not None else NO_CHANNEL

    def want(self, keys: tuple[str, ...]) -> list[N]:
        """Ask for the channels of these keys. Returns the nodes that still have to subscribe."""
        nodes: dict[int, N] = {}
        for key in keys:
            slot = slot_of(key)
            owner = self.owners[slot]
            if owner is not None and slot not in owner.channels.armed:
                # Any hash tag of this slot is suitable, as long as this client always uses the same one.
                owner.channels.want(slot, self._channels.setdefault(slot, self._named(key)))
                nodes[id(owner)] = owner
        return list(nodes.values())

    def _named(self, key: str) -> str:
        """The name of a channel in the slot of this key."""
        prefix = self.router.channel
        if "{" in prefix:  # from the namespace: a complete hash tag there determines the slot of all keys
            if slot_of(prefix) == slot_of(key):
                return prefix
            prefix = prefix[: prefix.index("{")] + prefix[prefix.rindex("holdfast:") :]
        return f"{prefix}:{{{tag_of(key)}}}"

    def slots_waited_for(self) -> set[int]:
        return set(map(slot_of, self.router.keys_waited_for()))

    def _move_channels(self) -> None:
        """For slots that have moved, subscribe to their channels on the new nodes."""
        moved = [
            (node, slot, channel)
            for node in list(self.nodes.values())
            for slot, channel in list(node.channels.wanted.items())
            if self.owners[slot] is not node and self.owners[slot] is not None
        ]
        waited_for = self.slots_waited_for() if moved else set()
        newly: dict[int, N] = {}
        for node, slot, channel in moved:
            node.channels.drop(slot)
            owner = self.owners[slot]
            if owner is not None and slot in waited_for:
                owner.channels.want(slot, channel)
                newly[id(owner)] = owner
        for owner in newly.values():
            owner.resubscribe()

    def forget(self) -> None:
        """In a forked child, or a new event loop: no channel is subscribed to."""
        self._channels.clear()
        for node in self.nodes.values():
            node.channels.forget()
