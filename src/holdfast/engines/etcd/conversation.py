"""The requests of a program as HTTP calls: to which member, with which credentials, and what an answer means.

Both engines run the same generator: it yields an ``HttpCall`` and is sent status and content, or an error of
``NO_ANSWER`` is thrown at it. It also yields each Watch and Unwatch of the program, which the engine starts and ends.

Any member can serve any request, because all requests go through the leader of etcd. A client stays with one member. If
that member cannot be reached, the request goes to the next one at once, because nothing was sent. If the member does
not answer, sends no reply of etcd, or says that there is no leader, the next try goes to another member.

A hung member must not use up the time of a step. So a member gets a share of the time that is left: the others must
still get theirs. If a member is silent, a request that can be repeated goes to the next member. A request that writes
cannot: the program would misread the second answer (a key that the first request has deleted is not there). Such a step
fails, and the protocol sends it again. The client avoids a member that was silent until that member answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypeAlias

import httpx

from holdfast.engines.etcd import failures, gateway
from holdfast.engines.etcd.target import EtcdTarget
from holdfast.engines.etcd.transport import Deadline
from holdfast.errors import Unavailable
from holdfast.protocol.effects import StepFailed
from holdfast.protocol.intents.refusals import SPACE_EXCEEDED
from holdfast.protocol.intents.requests import (
    TOLD,
    Answer,
    LeaseGone,
    NoSpace,
    NotExecuted,
    Program,
    Request,
    Txn,
    Unwatch,
    Watch,
)

_OK: Final = 200
_LEAST: Final = 0.01  # seconds that the last request of a program gets at least
_SMALLEST_SHARE: Final = 0.1  # seconds for one of several members: enough for a round trip
NO_ANSWER: Final = (httpx.HTTPError, gateway.Unreadable)  # why a call has no answer
# What a program raises if the answers to its requests do not fit together, or a value in them is not what it can be.
_UNFIT: Final = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Patience:
    """How long a step may take, in seconds, and how much of that is left."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self.seconds = seconds
        self.now = now
        self._until = now() + seconds

    def left(self) -> float:
        return self._until - self.now()


# What a body says, with its headers; Unreadable if it is none of etcd.
Read: TypeAlias = Callable[[bytearray, Mapping[str, str]], Any]


class HttpCall(NamedTuple):
    url: str
    body: bytes
    headers: dict[str, str]
    timeout: float
    read: Read

    def __repr__(self) -> str:
        return f"<call of {self.url}>"  # the rest holds tokens

    def content(self, answer: httpx.Response, body: bytearray) -> Any:
        """What an answer says, or the message of an error reply."""
        return self.read(body, answer.headers) if answer.status_code == _OK else failures.message_of(body)

    def request(self) -> httpx.Request:
        """For a transport of httpx. Its client would add cookies, redirections and a second look at the URL."""
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), Deadline(self.timeout))
        url = _parsed(self.url)
        return httpx.Request("POST", url, headers=self.headers, content=self.body, extensions={"timeout": timeouts})


_parsed = lru_cache(maxsize=256)(httpx.URL)

Conversation: TypeAlias = Generator[HttpCall | Watch | Unwatch, Any, Any]


class Members:
    """The members of one cluster, as one client knows them."""

    def __init__(self, target: EtcdTarget) -> None:
        self.target = target
        self.urls = tuple(dict.fromkeys(target.members))
        self.current = 0
        self.silent: dict[str, str] = {}  # members that did not answer, longest ago first, and what to say of them
        self.token = ""  # from ``authenticate``; "" if there is none
        self.ever_answered = False

    @property
    def url(self) -> str:
        return self.urls[self.current % len(self.urls)]

    @property
    def shown(self) -> str:
        """The current member, for errors."""
        return self.show(self.url)

    def show(self, url: str) -> str:
        return f"{'etcds' if self.target.tls else 'etcd'}://{url.partition('://')[2]}"

    def others(self, tried: Collection[str]) -> list[str]:
        """The members but these, in the order in which to try them. Members that were silent are at the end."""
        silent = list(self.silent)  # other threads write to it
        order = [self.urls[(self.current + step) % len(self.urls)] for step in range(len(self.urls))]
        return sorted(
            (url for url in order if url not in tried), key=lambda url: silent.index(url) + 1 if url in silent else 0
        )

    def leave(self, url: str) -> None:
        """Use another member, unless another request has switched already."""
        if self.url == url and (others := self.others((url,))):
            self.current = self.urls.index(others[0])

    def share(self, left: float, tried: Collection[str]) -> float:
        """How much of the time that is left the next member gets. The last one, or the only good one, gets all."""
        others = [url for url in self.urls if url not in tried]
        good = [url for url in others if url not in self.silent]
        return min(left, max(_SMALLEST_SHARE, left / max(1, len(good or others))))

    def note_silence(self, url: str, what: str) -> None:
        self.silent.pop(url, None)  # so that it comes last
        self.silent[url] = what

    def note_answer(self, url: str) -> None:
        if self.silent:
            self.silent.pop(url, None)

    def headers(self) -> dict[str, str]:
        return {"Authorization": self.token} if self.token else {}

    def forget(self) -> None:
        self.token = ""


def converse(program: Program, members: Members, timeout: float, now: Callable[[], float]) -> Conversation:
    """Run a program, and return its reply. StepFailed if one of its requests gets no usable answer."""
    patience = Patience(timeout, now)
    advance: Any = program.send
    value: Any = None
    sent = False  # an earlier request of the program may have changed something
    try:
        while True:
            request: Request = advance(value)
            advance = program.send
            if type(request) is Watch or type(request) is Unwatch:
                yield request
                value = None
                continue
            asked_at = now()
            if sent and patience.left() <= 0:
                raise failures.silence(members.shown, timeout, None, sent=True, ever_answered=True)
            try:
                result = yield from _exchange(request, members, patience)
                value = Answer(asked_at, result)
                sent = True
            except TOLD as told:
                advance, value = program.throw, told
                sent = sent or isinstance(told, NoSpace)
            except StepFailed as failed:
                if failed.sent:
                    raise
                advance, value = program.throw, NotExecuted(failed)
    except StopIteration as done:
        return done.value
    except (NoSpace, NotExecuted) as told:
        last = told.failed
    except StepFailed as failed:
        failed.sent = failed.sent or sent
        raise failed.with_traceback(None) from failed.__cause__  # the frames below refer to it: break the cycle
    except _UNFIT as error:
        if not sent:
            raise  # there was no answer yet, so it is a mistake of ours
        raise failures.unreadable(members.shown, error) from error
    finally:
        value = None  # it may be what was thrown, whose traceback refers to this frame: break the cycle
        program.close()
    try:
        last.sent = last.sent or sent
        raise last.with_traceback(None) from last.__cause__
    finally:
        del last


def _exchange(request: Any, members: Members, patience: Patience) -> Any:
    path, body = gateway.write(request)
    status, content, where = yield from _ask_any(
        path, body, partial(gateway.read, request), members, patience, repeatable=_is_repeatable(request)
    )
    if status == _OK:
        members.ever_answered = True
        return content
    message: str = content
    if failures.LEASE_UNKNOWN in message:
        raise LeaseGone
    failed = failures.refusal(status, message, where)
    if message:
        members.ever_answered = True
    if SPACE_EXCEEDED in message:
        raise NoSpace(failed)
    if failed.retry:
        members.leave(members.url)
    raise failed


def _ask_any(
    path: str, body: bytes, read: Read, members: Members, patience: Patience, *, repeatable: bool
) -> Generator[HttpCall, Any, tuple[int, Any, str]]:
    """Status, content and sender of the answer, with a valid token if the cluster has users."""
    target = members.target
    if target.user and not members.token:
        yield from _authenticate(members, patience)
    status, content, where = yield from _ask_reachable(path, body, read, members, patience, repeatable=repeatable)
    if status != _OK and target.user and failures.is_stale_token(content):
        members.token = ""
        yield from _authenticate(members, patience)
        status, content, where = yield from _ask_reachable(path, body, read, members, patience, repeatable=repeatable)
    return status, content, where


def _authenticate(members: Members, patience: Patience) -> Generator[HttpCall, Any, None]:
    who = gateway.body({"name": members.target.user, "password": members.target.password})
    status, content, where = yield from _ask_reachable(
        gateway.AUTHENTICATE, who, gateway.read_token, members, patience, repeatable=True
    )
    if status != _OK:
        failed = failures.refusal(status, content, where)
        failed.sent = False
        raise failed
    members.token = content


def _ask_reachable(
    path: str, body: bytes, read: Read, members: Members, patience: Patience, *, repeatable: bool
) -> Generator[HttpCall, Any, tuple[int, Any, str]]:
    """The answer of the first member that can be reached. ``repeatable``: after silence, too, ask the next one."""
    causes: dict[str, str] = {}
    tried: list[str] = []
    sent = False
    url: str | None = members.url
    while url is not None:
        where = members.show(url)
        left = patience.left()
        share = left if len(members.urls) == 1 else members.share(left, tried)
        try:
            status, content = yield HttpCall(url + path, body, members.headers(), max(_LEAST, share), read)
            members.note_answer(url)
            return status, content, where
        except gateway.Unreadable as error:
            failed = failures.unreadable(where, error)
        except httpx.HTTPError as error:
            waited = patience.seconds if share == left and not tried else max(_LEAST, share)
            failed = failures.transport_failure(
                error, where, waited, ever_answered=members.ever_answered, tls=members.target.tls
            )
        tried.append(url)
        if failed.silent:
            members.note_silence(url, *_causes(failed).values())
        members.leave(url)
        causes |= _causes(failed)
        others = members.others(tried)
        goes_on = patience.left() > 0 and (not failed.sent or (failed.silent and repeatable))
        url = others[0] if others and goes_on else None
        sent = sent or failed.sent
    failed.sent = sent
    if isinstance(failed.error, Unavailable):
        silent = {members.show(each): what for each, what in list(members.silent.items())}
        failed.error = Unavailable(silent | causes, failed.error.advice)
    raise failed


def _causes(failed: StepFailed) -> dict[str, str]:
    return dict(failed.error.causes) if isinstance(failed.error, Unavailable) else {}


def _is_repeatable(request: Any) -> bool:
    """Whether a request may be sent again after silence. If a lease was granted twice, the first one just expires."""
    return type(request) is not Txn or not request.changes
