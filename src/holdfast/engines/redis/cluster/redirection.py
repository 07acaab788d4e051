"""What the nodes of a cluster say about slots: the slot map, and redirections of single steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import hiredis

from holdfast.engines.redis.failures import lost_connection, silence
from holdfast.engines.redis.protocol import Op, is_redirection
from holdfast.errors import Unavailable
from holdfast.lua import SHARDED
from holdfast.names import SLOTS, slot_of
from holdfast.protocol.effects import Command, Step, StepFailed
from holdfast.protocol.kinds.parts import StepInParts, is_divisible

Address = tuple[str, int]

GET_SLOTS: Final = Command(("CLUSTER", "SLOTS"))
ASKING: Final = Command(("ASKING",))
_NO_HOST: Final = ("", "?")  # these mean the host of the node that sent the reply
_CHANGED: Final = ("CLUSTERDOWN", "READONLY", "MASTERDOWN", "LOADING")
_RANGE: Final = 3  # first slot, last slot, primary; replicas may follow


class Redirection(NamedTuple):
    """Another node serves this step: from now on (MOVED), or this once (``asking``: ASK)."""

    asking: bool
    slot: int
    address: Address


def redirection_of(error: BaseException | None, host: str) -> Redirection | None:
    """The redirection in an error reply, or in the cause of a StepFailed. ``host``: that of the sender."""
    reply = error.__cause__ if isinstance(error, StepFailed) else error
    if not is_redirection(reply):
        return None
    try:
        kind, slot, address = str(reply).split(" ")[:3]
        name, _, port = address.rpartition(":")
        found = Redirection(kind == "ASK", int(slot), (host if name in _NO_HOST else name, int(port)))
    except ValueError:
        return None
    return found if 0 <= found.slot < SLOTS else None


def is_outdated(failed: StepFailed) -> bool:
    """Whether this failure of a node is a reason to read the slot map again."""
    if isinstance(failed.__cause__, hiredis.ReplyError):
        return str(failed.__cause__).startswith(_CHANGED)
    return failed.retry


def read_slots(reply: Any, host: str) -> list[tuple[int, int, Address]]:
    """First slot, last slot and primary of each range in a reply to CLUSTER SLOTS. ValueError if it is malformed."""
    ranges = []
    try:
        for one in reply:
            first, last, (name, port, *_) = one[:_RANGE]
            text = (name or b"").decode()
            if not 0 <= int(first) <= int(last) < SLOTS:
                raise ValueError(f"no range of slots: {first} to {last}")
            ranges.append((int(first), int(last), (host if text in _NO_HOST else text, int(port))))
    except (TypeError, AttributeError) as error:
        raise ValueError("no reply to CLUSTER SLOTS") from error
    return ranges


def key_of(op: Op) -> str:
    """The key that decides which node runs this step; a command without one can run anywhere."""
    if isinstance(op, Step):
        return op.keys[0]
    return str(op.args[1]) if len(op.args) > 1 else ""


def first_key_of(ops: Sequence[Op]) -> str:
    """The first key that these steps name."""
    return next((key for op in ops if (key := key_of(op))), "")


def with_source(op: Op) -> Command:
    """The step as one command that no node answers with NOSCRIPT.

    After ASKING a node runs one command, so a script that it does not know could not be sent again.
    """
    if isinstance(op, Command):
        return op
    return Command(("EVAL", SHARDED[op.script].source.decode(), len(op.keys), *op.keys, *op.args))


class ExistsInParts:
    """EXISTS of several keys, which may be in different slots: one command for each."""

    def __init__(self, whole: Command) -> None:
        self._left = [Command(("EXISTS", key)) for key in whole.args[1:]]
        self.reply = 0
        self.step: Command | None = self._left[0]

    def answer(self, reply: Any) -> None:
        self.reply += int(reply)
        self._left.pop(0)
        self.step = self._left[0] if self._left else None


def in_parts(op: Op, channel_of: Any) -> StepInParts | ExistsInParts | None:
    """The parts of a step on several names, to be sent one after the other; None if it is on one name."""
    if isinstance(op, Step):
        return StepInParts(op, slot_of, channel_of) if is_divisible(op) else None
    return ExistsInParts(op) if op.args[0] == "EXISTS" and len(op.args) > 2 else None


def lost_track(address: str, what: str) -> StepFailed:
    """The StepFailed for a step that no node of the cluster has run."""
    error = Unavailable({address: what}, "The cluster may be changing; see CLUSTER INFO and CLUSTER SLOTS")
    return StepFailed(error, sent=False, retry=True)


def redirected(address: str) -> StepFailed:
    """The StepFailed for a step that was redirected too often, or until its time was over."""
    return lost_track(address, "its nodes disagree about which of them serves this key, or its slot is moving")


def moved_away(address: str) -> StepFailed:
    """The StepFailed for a dedicated connection to a node that no longer has its key."""
    failed = lost_connection(address, None)
    failed.sent = False
    return failed


def no_map(address: str, causes: list[StepFailed]) -> StepFailed:
    """The StepFailed for a cluster of which no node could be asked for the slot map."""
    if not causes:
        return silence(address, 0.0, None, sent=False)
    why: dict[str, str] = {}
    for failed in causes:
        if isinstance(failed.__cause__, hiredis.ReplyError) and "cluster support disabled" in str(failed.__cause__):
            failed.error = Unavailable(
                dict.fromkeys(getattr(failed.error, "causes", {}), "it is no node of a cluster"),
                "Use redis:// for a single server",
            )
        why.update(getattr(failed.error, "causes", {address: str(failed.error)}))
    advice = getattr(causes[0].error, "advice", "Check the nodes in the URL")
    retry = any(failed.retry for failed in causes)
    silent = all(failed.silent for failed in causes)
    failed = StepFailed(Unavailable(why, advice), sent=False, retry=retry, ever_answered=False, silent=silent)
    failed.__cause__ = causes[0].__cause__
    return failed
