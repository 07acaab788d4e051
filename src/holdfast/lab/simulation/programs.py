"""Protocols on a model of etcd or memcached: a program runs each step, request by request.

``expanded`` sits between a protocol and the machine that runs it. Each request of a program is a separate call. So a
search can lose, delay and repeat each request, and let other clients act between any two of them. The engines
run the same programs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final

from holdfast.lab.servers.etcd import LEASE_UNKNOWN, Etcd, Refused
from holdfast.lab.servers.memcached import Memcached
from holdfast.protocol import memcached
from holdfast.protocol.effects import Call, CallEach, Command, Effects, Step, StepFailed, clock
from holdfast.protocol.intents.programs import can_join, joint_program, program_of
from holdfast.protocol.intents.refusals import known_refusal
from holdfast.protocol.intents.requests import (
    Answer,
    LeaseGone,
    NoSpace,
    Op,
    Program,
    Request,
    Txn,
    Unwatch,
    Watch,
)
from holdfast.protocol.intents.session import Session
from holdfast.protocol.memcached import Items

if TYPE_CHECKING:
    from holdfast.lab.simulation.machine import Machine

PLAIN: Final = "etcd"  # the first word of a command that is a request of etcd already


class LabSession(Session):
    """The session of a machine. Most tokens have no watch; to end what there is not is no request."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: set[str] = set()


def use_etcd(machine: Machine) -> None:
    """Let everything that this machine runs from now on use etcd."""
    machine.session = LabSession()
    machine.router.armed = True
    machine.registry.keys_expire = False


def use_memcached(machine: Machine) -> None:
    """Let everything that this machine runs from now on use memcached."""
    machine.session = Items()
    machine.router.no_pubsub = True


def use_programs(machine: Machine, new_store: object) -> None:
    """Let this machine use the programs for servers of that class, if they run no scripts."""
    if isinstance(new_store, type) and issubclass(new_store, Etcd):
        use_etcd(machine)
    elif isinstance(new_store, type) and issubclass(new_store, Memcached):
        use_memcached(machine)


def expanded(routine: Any, session: LabSession | Items, channel: str) -> Generator[Any, Any, Any]:
    """The same routine, with the requests of programs in place of steps."""
    advance: Any = routine.send
    value: Any = None
    try:
        while True:
            try:
                effect = advance(value)
            except StopIteration as stop:
                return stop.value
            try:
                if isinstance(effect, Call):
                    value = yield from _run_one(effect, session, channel)
                elif isinstance(effect, CallEach):
                    value = yield from _run_each(effect, session, channel)
                else:
                    value = yield effect
                advance = routine.send
            except GeneratorExit:
                raise
            except BaseException as error:
                advance, value = routine.throw, error
    finally:
        routine.close()


def _run_one(effect: Call, session: LabSession | Items, channel: str) -> Effects[Any]:
    if isinstance(effect.step, Command) and effect.step.args[0] == PLAIN:
        reply = yield effect
        if isinstance(reply, Refused):
            raise _failure(reply)
        return reply
    now = yield from clock()
    if isinstance(session, Items):
        return (yield from _run_commands(memcached.program_of(session, effect.step, now), effect))
    program = program_of(session, effect.step, now)
    return (yield from _run(program, [effect.step], session, channel, effect.timeout, shielded=effect.shielded))


def _run_commands(program: memcached.Program, effect: Call) -> Effects[Any]:
    """Run a program of memcached."""
    sent = False
    try:
        command = program.send(None)
        while True:
            try:
                reply = yield effect._replace(step=command)
            except StepFailed as failed:
                failed.sent = failed.sent or sent
                raise
            sent = True
            command = program.send(reply)
    except StopIteration as done:
        return done.value
    finally:
        program.close()


def _run_each(effect: CallEach, session: LabSession | Items, channel: str) -> Effects[list[Any]]:
    now = yield from clock()
    if isinstance(session, LabSession) and can_join(effect.steps):
        try:
            replies: list[Any] = yield from _run(
                joint_program(session, effect.steps, now), effect.steps, session, channel, effect.timeout
            )
        except StepFailed as failed:
            return [failed] * len(effect.steps)
        return replies
    replies = []
    for step in effect.steps:
        try:
            replies.append((yield from _run_one(Call(step, effect.timeout, False), session, channel)))
        except StepFailed as failed:
            replies.append(failed)
    return replies


def _run(
    program: Program,
    steps: Sequence[Op],
    session: LabSession,
    channel: str,
    timeout: float,
    *,
    shielded: bool = False,
) -> Effects[Any]:
    advance: Any = program.send
    value: Any = None
    sent = False
    try:
        while True:
            request = advance(value)
            advance = program.send
            if isinstance(request, Watch):
                session.watched.add(request.token)
            elif isinstance(request, Unwatch):
                if request.token not in session.watched:
                    value = None
                    continue
                session.watched.remove(request.token)
            asked_at = yield from clock()
            try:
                reply = yield Call(Command((_name(steps, request), request, channel)), timeout, shielded)
            except StepFailed as failed:
                if isinstance(request, Watch | Unwatch):
                    value = None  # the watch is lost, which is allowed: nothing may depend on a watch
                    continue
                failed.sent = failed.sent or sent
                raise
            sent = True
            if reply == LEASE_UNKNOWN:
                advance, value = program.throw, LeaseGone()
            elif isinstance(reply, Refused):
                advance, value = program.throw, NoSpace(_failure(reply))
            else:
                value = None if isinstance(request, Watch | Unwatch) else Answer(asked_at, reply.result)
    except StopIteration as done:
        return done.value
    except NoSpace as full:
        raise full.failed from None
    finally:
        program.close()


def _name(steps: Sequence[Op], request: Request) -> str:
    """The steps that a request belongs to, and its kind."""
    kind = type(request).__name__
    if isinstance(request, Txn):
        kind = "Write" if request.changes else "Read"
    names = {step.script if isinstance(step, Step) else str(step.args[0]) for step in steps}
    return f"{PLAIN} {'+'.join(sorted(names))} {kind}"


def _failure(reply: Refused) -> StepFailed:
    failed = known_refusal(reply.message, "the model of etcd")
    assert failed is not None
    return failed
