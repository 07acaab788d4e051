"""Which program runs which step on etcd.

Invariant. A step has the same name, keys and arguments as on Redis, and the same reply, so that all protocols above are
the same on every engine. A step that has no program here belongs to a feature that etcd does not offer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeGuard

from holdfast.errors import Unsupported
from holdfast.protocol.effects import Command, Step, StepFailed
from holdfast.protocol.intents import holding, inspecting, latches, looking
from holdfast.protocol.intents.holding import Part, Parts, alone, together
from holdfast.protocol.intents.permits import acquire_permit, semaphore_ask
from holdfast.protocol.intents.queue import acquire, lock_ask, multi_ask, rwlock_ask
from holdfast.protocol.intents.requests import NoSpace, Op, Program
from holdfast.protocol.intents.session import Session

_PARTS: Final[dict[str, Callable[[Session, Step, float], Parts]]] = {
    **dict.fromkeys(("release", "pool_release", "multi_release"), holding.release_part),
    **dict.fromkeys(("abandon", "pool_abandon", "multi_abandon"), holding.abandon_part),
    **dict.fromkeys(("renew", "pool_renew", "multi_renew"), holding.renew_part),
}


def _acquire_pool(session: Session, step: Step, now: float) -> Program:
    if step.args[3] == "semaphore":
        return acquire_permit(session, semaphore_ask(step, now))
    return acquire(session, rwlock_ask(step, now))


_PROGRAMS: Final[dict[str, Callable[[Session, Any, float], Program]]] = {
    "acquire": lambda session, step, now: acquire(session, lock_ask(step, now)),
    "multi_acquire": lambda session, step, now: acquire(session, multi_ask(step, now)),
    "pool_acquire": _acquire_pool,
    "pool_share": holding.share,
    **dict.fromkeys(("hand_over", "pool_hand_over", "multi_hand_over"), holding.hand_over),
    **dict.fromkeys(("adopt", "pool_adopt", "multi_adopt"), holding.adopt),
    "latch_look": latches.look,
    "latch_count_down": latches.count_down,
    "election_leader": looking.leader,
    "pool_look": looking.look_at_pool,
    "pool_find": looking.find_in_pool,
    "present": looking.present,
    "EXISTS": looking.exists,
    "inspect_lock": inspecting.inspect,
    **dict.fromkeys(("break_lock", "break_permit"), inspecting.break_hold),
    "GET": inspecting.notice,
    "LRANGE": inspecting.history,
    "SCAN": inspecting.scan,
}

ON_ETCD: Final = frozenset({*_PARTS, *_PROGRAMS})  # the names of steps and commands that have a program


def program_of(session: Session, op: Op, now: float) -> Program:
    """The program of one step, or of a command that needs no script on Redis."""
    name = op.script if isinstance(op, Step) else str(op.args[0])
    if name in _PARTS and isinstance(op, Step):
        return alone(_PARTS[name](session, op, now))
    if name in _PROGRAMS:
        return _PROGRAMS[name](session, op, now)
    what = f"the command {name}" if isinstance(op, Command) else f"the step {name!r}"
    raise StepFailed(Unsupported(f"{what} on etcd", "use redis:// for it"), sent=False, retry=False)


def can_join(steps: Sequence[Op]) -> TypeGuard[Sequence[Step]]:
    """Whether these steps can share requests."""
    return all(isinstance(step, Step) and step.script in _PARTS for step in steps)


def _part(session: Session, step: Step, now: float) -> Parts:
    """The part of one of many steps. If etcd is full, that concerns no other step."""
    try:
        return (yield from _PARTS[step.script](session, step, now))
    except NoSpace as full:
        failed = full.failed
        return Part((), lambda results: failed)


def joint_program(session: Session, steps: Sequence[Step], now: float) -> Program:
    """The program of many steps that can share requests; it returns a reply for each."""
    parts = []
    for step in steps:
        parts.append((yield from _part(session, step, now)))
    return (yield from together(parts))
