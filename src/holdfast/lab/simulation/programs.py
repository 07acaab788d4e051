"""Protocols on a model of etcd: a program runs each step, request by request.

``expanded`` sits between a protocol and the machine that runs it. Each request of a program is a separate call. So a
search can lose, delay and repeat each request, and let other clients act between any two of them. The engine for etcd
runs the same programs over HTTP.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final

from holdfast.lab.servers.etcd import LEASE_UNKNOWN
from holdfast.protocol.effects import Call, CallEach, Command, Effects, Step, StepFailed, clock
from holdfast.protocol.intents.programs import can_join, joint_program, program_of
from holdfast.protocol.intents.requests import Answer, Get, LeaseGone, Op, Program, Request, Txn, Unwatch, Watch
from holdfast.protocol.intents.session import Session

if TYPE_CHECKING:
    from holdfast.lab.simulation.machine import Machine

PLAIN: Final = "etcd"  # the first word of a command that is a request of etcd already


def use_etcd(machine: Machine) -> None:
    """Let everything that this machine runs from now on use etcd."""
    machine.session = Session()
    machine.router.armed = True
    machine.registry.keys_expire = False


def expanded(routine: Any, session: Session, channel: str) -> Generator[Any, Any, Any]:
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


def _run_one(effect: Call, session: Session, channel: str) -> Effects[Any]:
    if isinstance(effect.step, Command) and effect.step.args[0] == PLAIN:
        return (yield effect)
    program = program_of(session, effect.step, (yield from clock()))
    return (yield from _run(program, [effect.step], effect.timeout, effect.shielded, channel))


def _run_each(effect: CallEach, session: Session, channel: str) -> Effects[list[Any]]:
    now = yield from clock()
    if can_join(effect.steps):
        try:
            replies: list[Any] = yield from _run(
                joint_program(session, effect.steps, now), effect.steps, effect.timeout, False, channel
            )
        except StepFailed as failed:
            return [failed] * len(effect.steps)
        return replies
    replies = []
    for step in effect.steps:
        try:
            program = program_of(session, step, now)
            replies.append((yield from _run(program, [step], effect.timeout, False, channel)))
        except StepFailed as failed:
            replies.append(failed)
    return replies


def _run(program: Program, steps: Sequence[Op], timeout: float, shielded: bool, channel: str) -> Effects[Any]:
    advance: Any = program.send
    value: Any = None
    sent = False
    try:
        while True:
            request = advance(value)
            advance = program.send
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
            else:
                value = None if isinstance(request, Watch | Unwatch) else Answer(asked_at, reply.result)
    except StopIteration as done:
        return done.value
    finally:
        program.close()


def _name(steps: Sequence[Op], request: Request) -> str:
    """The steps that a request belongs to, and its kind."""
    kind = type(request).__name__
    if isinstance(request, Txn):
        kind = "Read" if all(isinstance(one, Get) for one in (*request.then, *request.otherwise)) else "Write"
    names = {step.script if isinstance(step, Step) else str(step.args[0]) for step in steps}
    return f"{PLAIN} {'+'.join(sorted(names))} {kind}"
