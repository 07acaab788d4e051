"""What a step asks of etcd, and what etcd answers, as plain values.

Invariant. A step on etcd is a *program*: a generator that yields the requests below, is sent an ``Answer`` for each,
and returns the raw reply of the step, as the script of the same name would (see replies.py). A program uses no socket
and no clock. The engine runs it over HTTP; the lab runs it on a model of etcd.

Atomic: each request. Between two requests of one program any other client may act, so a program of several requests
decides by the compares of the last one.

If etcd does not know a lease (it expired, or was revoked), ``LeaseGone`` is thrown at the request, which has done
nothing. If the database of etcd is full, ``NoSpace`` is thrown; the request may have been executed. If it is known that
no member has executed it or will, ``NotExecuted`` is. Any other failure ends the program, as it ends a script: the step
has no reply.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.protocol.effects import Command, Step, StepFailed
from holdfast.protocol.intents.maintenance import Question

MOST_OPERATIONS = 120  # in one transaction; etcd refuses more than 128 unless it is told otherwise


class Created(NamedTuple):
    """Compare: the key was created at that revision; 0: it does not exist. With ``end``: so is each key of the range,
    and 0 means that the range is empty."""

    key: str
    revision: int = 0
    end: str = ""


class Modified(NamedTuple):
    """Compare: the key was last written at that revision; 0: it does not exist."""

    key: str
    revision: int


class Older(NamedTuple):
    """Compare: each key of the range, if there is any, was created before that revision."""

    key: str
    revision: int
    end: str


class Put(NamedTuple):
    key: str
    value: str
    lease: int = 0  # 0: none, so the key does not expire


class Delete(NamedTuple):
    """The result is the number of keys that were there."""

    key: str


class Get(NamedTuple):
    """The result is a Found. With ``end``: all keys from ``key`` up to ``end``, in the order of creation."""

    key: str
    end: str = ""
    limit: int = 0  # 0: all
    newest_first: bool = False
    created_before: int = 0  # a revision; 0: at any time
    count_only: bool = False
    keys_only: bool = False  # without values, and in the order of the keys: the cost of a part is that of its keys only


Compare: TypeAlias = Created | Modified | Older
Operation: TypeAlias = "Put | Delete | Get | Txn"


class Txn(NamedTuple):
    """If all compares hold, ``then`` happens, else ``otherwise``, each operation in order.

    As an operation of another transaction it has compares of its own, which see the state before both.
    """

    compares: tuple[Compare, ...]
    then: tuple[Operation, ...]
    otherwise: tuple[Operation, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether it may change a key."""
        return any(
            each.changes if type(each) is Txn else type(each) is not Get for each in (*self.then, *self.otherwise)
        )

    def __repr__(self) -> str:
        return f"<txn of {len(self.then)} operations>"  # without the tokens: tracebacks may show locals


class GrantLease(NamedTuple):
    """A new lease of that many seconds; the result is a LeaseLife."""

    seconds: int


class KeepLease(NamedTuple):
    """Let the lease begin again; the result is a LeaseLife, with 0 seconds if there is no such lease."""

    lease: int


class ReadLease(NamedTuple):
    """How long the lease lasts unless it is renewed; the result is a LeaseLife, with 0 seconds if it is gone."""

    lease: int


class Watch(NamedTuple):
    """Wake this waiter, or have this holder look, when a key of the range changes after that revision. No result.

    ``puts``: a write of a key counts as a change, too, and not only its deletion.
    """

    token: str
    key: str
    revision: int
    end: str = ""
    puts: bool = False
    holder: str = ""  # the lock's key, if a holder has its own key watched


class Unwatch(NamedTuple):
    """This token waits or holds no longer. No result."""

    token: str


Request: TypeAlias = Txn | GrantLease | KeepLease | ReadLease | Watch | Unwatch | Question


class Item(NamedTuple):
    key: str
    value: str
    created: int
    modified: int
    lease: int = 0


class Found(NamedTuple):
    items: tuple[Item, ...]
    total: int  # of the keys in the range, whatever the limit


class TxnResult(NamedTuple):
    succeeded: bool
    revision: int
    results: tuple[Any, ...]  # for each operation: a Found, a number of deleted keys, a TxnResult, or None


class LeaseLife(NamedTuple):
    lease: int
    seconds: int


class Answer(NamedTuple):
    """``asked_at``: the time before the request was sent, by our clock."""

    asked_at: float
    result: Any


class LeaseGone(Exception):
    """etcd does not know the lease that a request names. The request has done nothing."""


class NoSpace(Exception):
    """The database of etcd is full. etcd may have executed the request before it answered so; it will not do so later.

    Requests that write a key or grant a lease are refused; by some versions (3.5.1) every transaction, too.
    """

    def __init__(self, failed: StepFailed) -> None:
        super().__init__()
        self.failed = failed  # the failure of the step, unless its program goes on without that request


class NotExecuted(Exception):
    """No member has executed the request, and none will: none could be reached, or it was refused."""

    def __init__(self, failed: StepFailed) -> None:
        super().__init__()
        self.failed = failed


TOLD: Final = (LeaseGone, NoSpace, NotExecuted)  # what is thrown at a request


Program: TypeAlias = Generator[Request, Answer, Any]
Op: TypeAlias = Step | Command


# Programs yield by these functions only.


def run_until(stopped: Callable[[], bool], program: Program, reply: Any) -> Program:
    """Run a program, and return its reply; once ``stopped``, send no further request and return the other reply."""
    advance: Any = program.send
    value: Any = None
    try:
        while True:
            request = advance(value)
            if stopped():
                return reply
            try:
                advance, value = program.send, (yield request)
            except TOLD as told:
                advance, value = program.throw, told
    except StopIteration as done:
        return done.value
    finally:
        value = None  # what was thrown has a traceback that refers to this frame: break the cycle
        program.close()


def perform(txn: Txn) -> Generator[Request, Answer, TxnResult]:
    inner = txn.then[0] if len(txn.then) == 1 and not txn.compares else None
    answer = yield txn if type(inner) is not Txn else inner  # a release needs no transaction around its own
    result: TxnResult = answer.result
    return result if type(inner) is not Txn else TxnResult(True, result.revision, (result,))


def grant_lease(seconds: int) -> Generator[Request, Answer, Answer]:
    return (yield GrantLease(seconds))


def keep_lease(lease: int) -> Generator[Request, Answer, Answer]:
    return (yield KeepLease(lease))


def read_lease(lease: int) -> Generator[Request, Answer, int]:
    answer = yield ReadLease(lease)
    seconds: int = answer.result.seconds
    return seconds


def ask(question: Question) -> Generator[Request, Answer, Any]:
    answer = yield question
    return answer.result


def begin_watch(watch: Watch) -> Generator[Request, Answer, None]:
    yield watch


def end_watch(token: str) -> Generator[Request, Answer, None]:
    yield Unwatch(token)
