"""Contact with a server: since when it has not served this client, and how long a call goes on trying.

Invariant. Contact with a node is lost at the send of the first request that failed since the last one that was served.
It is a fact of the client: every driver notes every step here, and every call judges by the same record. What does not
count as a loss: a closed connection, until a request that was sent after that fails as well; a request that was sent
before the last one that was served; a clean-up without an answer; and an error that no further try can change, because
the server has answered. A server that answers "out of memory", "read-only" or "loading" does not serve: contact is back
once it serves a request of the kind that it refused, or one that takes a lock. A renewal that it answers does not count
then, nor a value that it still has.

A call with a bounded wait ends once contact has been lost for its ``outage_wait``, but not before it has tried for two
answer times itself. If it begins later, it ends at once. One such call at a time is a *probe*: it tries, for PROBE
seconds at most, and calls that begin meanwhile wait for its verdict. The next probe comes PROBE_EVERY seconds after the
last. So a server that is back is found by the next call, without a thread that looks for it, and an outage does not
fill a pool of threads. A server may be too slow for a probe, or a call may have nothing to ask, because a hold of its
own process has the lock. So a call that ends in an outage leaves a token to the keeper, to bury it as after any attempt
that was given up: contact is back when that is done.

Before the first request was ever served nothing of this applies: see ``StepFailed.ever_answered``. Holders are not
concerned either: renewals, releases, extensions and clean-ups are tried as long as they can matter.

Atomic: single attributes and dict operations, so any thread may call. If two threads note at once, the record may be a
few milliseconds off.

A server may be far away. So a call has never less than ``least`` seconds: three round trips, as long as the quickest
request took that was served since contact began, or began again. One quick request shows that the server is near.
Slow ones may have waited for a connection, for a busy process, or for a server that hung, so many are looked at.

Clocks: times are those of the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from holdfast.errors import Unavailable, rounded
from holdfast.options import LockOptions
from holdfast.protocol.effects import Command, Effects, Step, StepFailed, Wakeup, clock, wait
from holdfast.protocol.wait.failures import again
from holdfast.protocol.wait.served import BURYING, has_written, key_of, name_of

SHORTEST_CALL: Final = 0.1  # even the last try before a deadline gets time for a round trip
LONGEST_CALL: Final = 1.0  # a stuck connection must not keep the keeper from other leases for long
PROBE: Final = 0.3  # seconds for which a probe tries; longer if the server is far away
PROBE_EVERY: Final = 0.5

_FIRST_LINE: Final = 0.25  # seconds without contact after which an outage is logged, and waiters are told
_FIRST_PAUSE: Final = 1.0  # seconds until the next line; doubled each time
_RAREST_LINE: Final = 60.0
_MEASURED: Final = 50  # slow requests after which the server counts as far away for as long as contact lasts
_NEVER: Final = float("inf")


def one_node(key: str) -> str:
    """The node of that key, unless the server is a cluster."""
    return ""


class Probe:
    """The one call that finds out whether the server is back."""

    __slots__ = ("_contact", "began", "ends")

    def __init__(self, contact: Contact, now: float) -> None:
        self._contact = contact
        self.began, self.ends = now, now + contact.probe_time

    def end(self) -> None:
        """The verdict is there: ``lost_at`` of its contact."""
        self._contact.end_probe(self)


class Contact:
    """Contact with one node."""

    __slots__ = (
        "_broke_at",
        "_failed_at",
        "_log_after",
        "_log_at",
        "_logged",
        "_measured",
        "_probe",
        "_probe_after",
        "_refused",
        "_round_trip",
        "_waiting",
        "failed",
        "failures",
        "had",
        "least",
        "lost_at",
        "served_at",
    )

    def __init__(self, *, had: bool) -> None:
        self.had = had  # whether the node has ever served a request
        self.lost_at: float | None = None
        self.served_at = -_NEVER  # when the last request that was served was sent
        self.failed: StepFailed | None = None  # the last one; kept when contact is back, for calls that end just then
        self.failures = 0  # since it was lost
        self.least = SHORTEST_CALL  # seconds that any call has for its answer
        self._round_trip = 0.0  # the shortest time that a request took
        self._measured = 0  # requests
        self._failed_at = 0.0  # when the last failure was known
        self._broke_at = _NEVER  # when a connection was found closed, with nothing served since
        self._refused: set[str] = set()  # what the server has answered with an error, by name
        self._log_at, self._log_after = _NEVER, _FIRST_PAUSE  # when to log that the outage lasts
        self._logged = False  # its begin
        self._probe: dict[None, Probe] = {}  # set by ``setdefault``
        self._probe_after = 0.0  # when the next one may begin
        self._waiting: dict[Wakeup, None] = {}  # of calls that wait for the verdict of the probe

    # What was found out.

    def lose(self, name: str, sent_at: float, failed: StepFailed, now: float) -> None:
        """A request of that name failed."""
        if failed.connection_broke and sent_at < self._broke_at:
            self._broke_at = min(self._broke_at, now)
            return
        lost_at = self.lost_at  # another thread may end the outage meanwhile
        if failed.answered:
            self._refused.add(name)
        elif sent_at < self.served_at or (lost_at is None and name in BURYING):
            return  # a clean-up gives the server less time than a call does, so it begins no outage
        self.failed, self._failed_at = failed.with_traceback(None), now  # before it is lost: others read it then
        if lost_at is None:
            self._log_at, self._log_after, self._logged = sent_at + _FIRST_LINE, _FIRST_PAUSE, False
            self.failures = self._measured = 0
            self.lost_at = sent_at
        elif sent_at < lost_at:  # a request with a shorter time failed before
            self.lost_at = sent_at
        self.failures += 1

    def serve(self, op: Step | Command, reply: object, sent_at: float, now: float) -> str:
        """A request was served; returns what to log, mostly ""."""
        self.served_at = max(self.served_at, sent_at)
        self._measure(now - sent_at)
        if self._refused and not has_written(op, reply) and name_of(op) not in self._refused - BURYING:
            return ""
        self.had, self._broke_at = True, _NEVER
        lost_at, self.lost_at = self.lost_at, None
        if lost_at is None:
            return ""
        self._refused.clear()
        self._wake()
        if not self._logged:
            return ""
        least, most = rounded(self._failed_at - lost_at), rounded(now - lost_at)
        lasted = f"{least} to {most}" if now - self._failed_at > 1.0 else most  # nothing was asked in between
        failed = self.failed
        what, of = ("service", "of") if failed is not None and failed.answered else ("contact", "with")
        if failed is not None and isinstance(failed.error, Unavailable):
            what = f"{what} {of} {', '.join(failed.error.causes)}"
        return f"{what} is back after {lasted} s, in which {_requests(self.failures)} failed"

    def _measure(self, took: float) -> None:
        self._round_trip = min(self._round_trip, took) if self._measured else took
        self._measured += 1
        self.least = min(LONGEST_CALL, max(SHORTEST_CALL, 3 * self._round_trip))

    def line(self, now: float) -> str:
        """What to log about an outage that lasts; mostly ""."""
        lost_at = self.lost_at  # another thread may end the outage meanwhile
        if lost_at is None or self.failed is None or now < self._log_at:
            return ""
        pause = self._log_after
        self._log_at, self._log_after = now + pause, min(2 * pause, _RAREST_LINE)
        missing = "no service" if self.failed.answered else "no contact"
        lasts = f"{missing} for {rounded(now - lost_at)} s"
        if self._logged:
            lasts = f"still {lasts}, {_requests(self.failures)} failed"
        self._logged = True
        return f"{lasts}: {self.failed.error}"

    def is_logged(self) -> bool:
        """Whether the begin of a present outage was logged."""
        return self.lost_at is not None and self._logged

    def answers(self) -> bool:
        """Whether the server answers, though it may not serve."""
        return self.lost_at is None or (self.failed is not None and self.failed.answered)

    def refuses(self) -> bool:
        """Whether the server answers, but does not serve."""
        return bool(self._refused)

    def is_calm(self) -> bool:
        """Whether there is contact, and nothing to remember when the next request is served."""
        known = self.least == SHORTEST_CALL or self._measured >= _MEASURED
        return self.had and known and self.lost_at is None and self._broke_at == _NEVER and not self._refused

    # How long a call goes on.

    @property
    def probe_time(self) -> float:
        """How long a probe may take."""
        return max(PROBE, self.least)

    def answer_time(self, options: LockOptions, patience: float) -> float:
        """How long the first try of a call may take: a third of the time, so that there is time for another try."""
        bounded = self.had and patience != _NEVER
        return max(self.least, min(options.answer_time if bounded else options.first_try, patience / 3))

    def gives_up_at(self, options: LockOptions, began: float, patience: float, probe: Probe | None = None) -> float:
        """When a call that began then ends, unless contact is back before. ``probe``: it is that probe."""
        lost_at = self.lost_at
        if lost_at is None or options.outage_wait is None or patience == _NEVER or not self.had:
            return _NEVER
        if probe is not None:
            return probe.ends
        return max(lost_at + options.outage_wait, began + 2 * self.answer_time(options, patience))

    def admit(
        self, options: LockOptions, new_wakeup: Callable[[], Wakeup], *, reads: bool = False
    ) -> Effects[Probe | None]:
        """A call with a bounded wait begins while contact is lost; returns a probe if it is one; then it must end it.

        ``reads``: it takes nothing. Raises StepFailed if contact has been lost for longer than its ``outage_wait``, and
        it is no probe.
        """
        now = yield from clock()
        while (lost_at := self.lost_at) is not None and self.had and options.outage_wait is not None:
            if now < lost_at + options.outage_wait:
                return None
            if reads and self.answers():
                return Probe(self, now)  # a server that is full, or a replica, may answer this
            probe = self._probe.get(None)
            if probe is None:
                if now < self._probe_after:
                    raise self.failure()
                mine = Probe(self, now)
                if self._probe.setdefault(None, mine) is mine:
                    self._probe_after = now + PROBE_EVERY
                    return mine
            elif now >= probe.ends + SHORTEST_CALL:  # it was lost to an interrupt
                probe.end()
            else:
                now = yield from self._verdict(probe, new_wakeup())
        return None

    def _verdict(self, probe: Probe, wakeup: Wakeup) -> Effects[float]:
        """Wait for the verdict of that probe; returns the time."""
        self._waiting[wakeup] = None
        try:
            if self._probe.get(None) is probe and self.lost_at is not None:  # else it came before we were registered
                return (yield from wait(wakeup, probe.ends + SHORTEST_CALL))
            return (yield from clock())
        finally:
            self._waiting.pop(wakeup, None)

    def end_probe(self, probe: Probe) -> None:
        """See ``Probe.end``."""
        if self._probe.get(None) is probe:
            if self._failed_at < probe.began:  # it found nothing out: its caller left, or its process has the lock
                self._probe_after = 0.0
            self._probe.pop(None, None)
            self._wake()

    def _wake(self) -> None:
        for wakeup in list(self._waiting):
            wakeup.wake()

    def retire(self) -> None:
        """The node has no locks any more: calls that wait for a verdict about it begin anew."""
        self.lost_at = None
        self._wake()

    def failure(self) -> StepFailed:
        """The present outage, as the failure of another call."""
        failed = self.failed
        if failed is None:  # the lock has just moved to a node that has not failed
            what = {"the server": "contact was lost while the lock moved to another node"}
            return StepFailed(Unavailable(what, "Try again"), sent=False, retry=True)
        return again(failed)

    def overdue(self, now: float, answer_time: float) -> StepFailed | None:
        """The present outage, if it is one for a call that gives the server that time."""
        lost_at = self.lost_at  # another thread may end the outage meanwhile
        if lost_at is None:
            return None
        failed = self.failure()
        return None if failed.silent and now - lost_at < answer_time else failed


class Contacts:
    """Contact with each node of a client's server. A driver notes the outcome of every request."""

    def __init__(self) -> None:
        self.node_of: Callable[[str], str] = one_node  # by key
        self.only = Contact(had=False)  # unless there are several nodes
        # There is one node, and contact with it: then a driver sets ``only.served_at`` itself (benchmarks.uncontended).
        self.calm = False
        self._nodes: dict[str, Contact] = {}
        self._log: Callable[[str], object] = bool
        self._held: Callable[[float], str] = lambda now: ""
        self._wake: tuple[Callable[[], None], ...] = ()

    def tell(self, log: Callable[[str], object], held: Callable[[float], str], *wake: Callable[[], None]) -> None:
        """Log outages there, with what is held. ``wake``: each wakes callers that send nothing, when one begins."""
        self._log, self._held, self._wake = log, held, wake

    def of(self, key: str, *others: str) -> Contact:
        """Contact with the node of that key. Of several keys: with the node that has been lost for longest, if any."""
        if self.node_of is one_node:
            return self.only
        if others:
            contacts = [self.of(one) for one in (key, *others)]
            return min(contacts, key=lambda contact: _NEVER if (lost_at := contact.lost_at) is None else lost_at)
        node = self.node_of(key)
        # Another node has named it, unless no map of the cluster was read yet.
        return self._nodes.get(node) or self._nodes.setdefault(node, Contact(had=node != ""))

    @property
    def least(self) -> float:
        """Seconds that any call has for its answer, whichever node it is for."""
        if self.node_of is one_node:
            return self.only.least
        return max((contact.least for contact in list(self._nodes.values())), default=SHORTEST_CALL)

    def any_lost(self) -> bool:
        """Whether contact with a node is lost."""
        return any(contact.lost_at is not None for contact in (self.only, *list(self._nodes.values())))

    def note_failure(self, op: Step | Command, sent_at: float, failed: StepFailed, now: float) -> None:
        """A request that was sent at that time failed."""
        contact = self.of(key_of(failed.part or op))
        if not failed.retry and failed.ever_answered:
            if failed.answered and contact.had and not contact.refuses():
                self.note_reply(op, None, sent_at, now)  # it answers; what it says is for the caller
            return
        contact.lose(name_of(op), sent_at, failed, now)
        self.calm = False  # last: see note_reply
        if line := contact.line(now):
            self._log(line + self._held(now))
            for wake in self._wake:
                wake()

    def note_reply(self, op: Step | Command, reply: object, sent_at: float, now: float) -> None:
        """A request that was sent at that time was served."""
        if self._is_in_parts(op):
            return  # the engine has noted each part, which may be not all of them
        contact = self.of(key_of(op))
        if line := contact.serve(op, reply, sent_at, now):
            self._log(line)
        self.calm = contact is self.only and contact.is_calm()
        if self.calm and not contact.is_calm():
            self.calm = False  # another thread has noted a failure in between

    def note(self, ops: Sequence[Step | Command], replies: Sequence[Any], sent_at: float, now: float) -> None:
        """Requests that were sent together have these replies, or failures."""
        if self.calm and not any(isinstance(reply, StepFailed) for reply in replies):
            self.only.served_at = max(self.only.served_at, sent_at)
            return
        for op, reply in zip(ops, replies, strict=True):
            if isinstance(reply, StepFailed):
                self.note_failure(op, sent_at, reply, now)
            else:
                self.note_reply(op, reply, sent_at, now)

    def _is_in_parts(self, op: Step | Command) -> bool:
        """Whether this is a step on several names of different nodes."""
        if self.node_of is one_node or not name_of(op).startswith("multi_") or not isinstance(op, Step):
            return False
        return len({self.node_of(key) for key in op.keys}) > 1

    def keep_only(self, nodes: Collection[str]) -> None:
        """Nothing is asked of other nodes any more, so it will not be known when contact with them is back."""
        for node, contact in list(self._nodes.items()):
            if node not in nodes and self._nodes.pop(node, None) is not None:
                if node and contact.is_logged():
                    self._log(f"no contact with {node} any more: its locks have moved to other nodes")
                contact.retire()

    def forget(self) -> None:
        """After a fork, or in a new event loop: what was lost may be there for this process."""
        self._nodes.clear()
        self.only, self.calm = Contact(had=self.only.had), False


def _requests(number: int) -> str:
    return "1 request to it" if number == 1 else f"{number} requests to it"
