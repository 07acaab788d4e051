"""Nothing of a client outlives its reason on etcd: no key stays because other locks renew the lease that it is on.

On the model of etcd: a client goes on using other locks, while a request of an earlier attempt is late, while a step
goes on although its caller was cancelled, or while one of two steps of the same hold runs beside the other.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from holdfast.lab.servers.etcd import LEASE_UNKNOWN, Etcd
from holdfast.protocol.effects import Step, StepFailed
from holdfast.protocol.intents.programs import joint_program, program_of
from holdfast.protocol.intents.refusals import known_refusal
from holdfast.protocol.intents.requests import Answer, LeaseGone, NoSpace, NotExecuted, Txn, Unwatch, Watch
from holdfast.protocol.intents.session import MOST_TOMBSTONES, Session
from holdfast.protocol.replies import DONE, GONE

TTL: Final = "30000"
LONG: Final = "300000"


class Client:
    """A client of the model. ``full``: etcd refuses transactions, as 3.5.1 does if its database is full."""

    def __init__(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.session = Session()
        self.full = False

    @property
    def now(self) -> float:
        return self.etcd.now_us / 1e6

    def begin(self, step: Step) -> Running:
        return Running(self, program_of(self.session, step, self.now))

    def do(self, step: Step) -> Any:
        return self.begin(step).finish()

    def execute(self, request: Any) -> Any:
        """What the program is sent, or is thrown, for that request."""
        refuses = isinstance(request, Txn) and (len(request.then) > 1 or request.compares)
        if self.full and refuses:
            failed = known_refusal("etcdserver: mvcc: database space exceeded", "etcd")
            assert failed is not None
            return NoSpace(failed)
        asked_at = self.now
        reply = self.etcd.execute("etcd", request, "channel")
        if type(request) is Watch or type(request) is Unwatch:
            return None
        return LeaseGone() if reply == LEASE_UNKNOWN else Answer(asked_at, reply.result)


class Running:
    """A step under way: ``send`` has its next request executed, and ``receive`` gives it the answer."""

    def __init__(self, client: Client, program: Any) -> None:
        self._client, self._program = client, program
        self._answer: Any = None
        self.request: Any = None
        self.is_over = False
        self.reply: Any = None
        self._advance(None)

    def _advance(self, value: Any) -> None:
        try:
            thrown = isinstance(value, LeaseGone | NoSpace)
            self.request = self._program.throw(value) if thrown else self._program.send(value)
        except StopIteration as done:
            self.is_over, self.reply = True, done.value

    def send(self) -> None:
        self._answer = self._client.execute(self.request)

    def receive(self) -> None:
        self._advance(self._answer)

    def step(self) -> None:
        self.send()
        self.receive()

    def until_write(self) -> None:
        """Go on until its next request is one that writes keys."""
        while not (isinstance(self.request, Txn) and self.request.changes):
            self.step()

    def lose(self) -> Any:
        """Its request gets no answer: the step ends, and the request can arrive later."""
        self._program.close()
        return self.request

    def throw(self, told: Exception) -> None:
        self._program.throw(told)

    def finish(self) -> Any:
        while not self.is_over:
            self.step()
        return self.reply


def lock(token: str, name: str = "k", *, ttl: str = TTL, waits: bool = True) -> Step:
    return Step("acquire", (name,), (token, ttl, "0", "1", "0 channel" if waits else "", ""))


def permit(token: str, *, waits: bool, permits: int = 1) -> Step:
    args = (token, TTL, "0", "semaphore", "0 channel" if waits else "", f"n{permits}")
    return Step("pool_acquire", ("k:hf1:holders",), args)


def renew(token: str, name: str = "k", ttl: str = TTL) -> Step:
    return Step("renew", (name,), (token, ttl))


def release(token: str, name: str = "k") -> Step:
    return Step("release", (name,), (token,))


def abandon(token: str) -> Step:
    return Step("abandon", ("k",), (token, "60000"))


def hand_over(token: str, name: str = "k", *, tombstone: bool = False) -> Step:
    return Step("hand_over", (name,), (token, TTL, "60000" if tombstone else "0"))


def adopt(token: str) -> Step:
    return Step("adopt", ("k",), (token, TTL, "0", "giver"))


def not_executed() -> NotExecuted:
    failed = known_refusal("etcdserver: no leader", "etcd")
    assert failed is not None
    return NotExecuted(failed)


@pytest.fixture
def etcd() -> Etcd:
    return Etcd()


def keys_of(etcd: Etcd, token: str) -> list[str]:
    return [key for key, item in etcd.items.items() if token in key + item.value and ":gone:" not in key]


def tombstones(etcd: Etcd) -> list[str]:
    return [key for key in etcd.items if ":gone:" in key]


def let_pass(etcd: Etcd, seconds: float, *others: tuple[Client, str, str]) -> None:
    """Time passes, in which these clients renew these other locks."""
    for _ in range(round(seconds / 10)):
        etcd.now_us += 10_000_000
        for client, token, name in others:
            assert client.do(renew(token, name)) == DONE


# A create that is late.


@pytest.mark.parametrize("taken_by", ["a permit", "a lock"])
def test_a_try_that_is_refused_after_a_create_without_an_answer(etcd: Etcd, taken_by: str) -> None:
    """The retry creates its key behind another client's, and removes it: the first create can then arrive."""
    mine, other = Client(etcd), Client(etcd)
    assert mine.do(lock("elsewhere", "other"))
    first = mine.begin(permit("mine", waits=False))
    first.until_write()
    late = first.lose()
    again = mine.begin(permit("mine", waits=False))
    again.until_write()
    assert other.do(permit("theirs", waits=True) if taken_by == "a permit" else lock("theirs"))
    reply = again.finish()
    assert reply[0] == (0 if taken_by == "a permit" else -2), "it was too late"
    assert mine.do(abandon("mine"))[1], "the tombstone is there"
    etcd.execute("etcd", late, "channel")
    assert keys_of(etcd, "mine") == []
    script = "pool_release" if taken_by == "a permit" else "release"
    other.do(Step(script, ("k:hf1:holders",), ("theirs",)))
    assert mine.session.intents.keys() == {"elsewhere"}


@pytest.mark.parametrize("late_by", [0.0, 60.0, 600.0])
def test_a_create_that_arrives_after_its_attempt_was_given_up_does_nothing(etcd: Etcd, late_by: float) -> None:
    """However late it is, and although its client goes on renewing another lock of the same ttl."""
    mine = Client(etcd)
    assert mine.do(lock("elsewhere", "other"))
    attempt = mine.begin(lock("mine"))
    attempt.until_write()
    late = attempt.lose()
    assert mine.do(abandon("mine")) == [GONE, 1]
    let_pass(etcd, late_by, (mine, "elsewhere", "other"))
    etcd.execute("etcd", late, "channel")
    assert keys_of(etcd, "mine") == []


def test_tombstones_do_not_accumulate(etcd: Etcd) -> None:
    mine = Client(etcd)
    assert mine.do(lock("elsewhere", "other"))
    for number in range(7 * MOST_TOMBSTONES):
        attempt = mine.begin(lock(f"mine{number}"))
        attempt.until_write()
        attempt.lose()
        mine.do(abandon(f"mine{number}"))
        etcd.now_us += 100_000
        if number % 50 == 0:
            assert mine.do(renew("elsewhere", "other")) == DONE
    let_pass(etcd, 100.0, (mine, "elsewhere", "other"))
    assert len(tombstones(etcd)) <= 2 * MOST_TOMBSTONES, "those of the lease that is in use, and of the hold's"
    mine.do(release("elsewhere", "other"))
    etcd.now_us += 100_000_000
    assert etcd.items == {}


def test_all_creates_of_an_attempt_name_one_lease(etcd: Etcd) -> None:
    """Two threads are granted a lease each. The tombstone must be on the lease that the first, late create names."""
    mine = Client(etcd)
    first, second = (mine.begin(lock(token, token)) for token in ("elsewhere", "third"))
    first.send()
    second.send()
    first.receive()
    attempt = mine.begin(lock("mine"))
    attempt.until_write()
    late = attempt.lose()
    first.finish()
    second.receive()
    second.finish()
    again = mine.begin(lock("mine"))
    again.until_write()
    again.lose()
    mine.do(abandon("mine"))
    let_pass(etcd, 100.0, (mine, "elsewhere", "elsewhere"))
    etcd.execute("etcd", late, "channel")
    assert keys_of(etcd, "mine") == []


def test_no_tombstone_for_an_attempt_whose_create_was_answered(etcd: Etcd) -> None:
    mine = Client(etcd)
    mine.do(lock("mine"))
    mine.begin(renew("mine")).lose()
    assert mine.do(abandon("mine")) == [DONE, 1]
    assert tombstones(etcd) == []


def test_a_place_that_a_late_write_has_changed_is_not_forgotten(etcd: Etcd) -> None:
    """A holder that asked for more permits had the slot; meanwhile the late request has taken it."""
    mine, other = Client(etcd), Client(etcd)
    mine.do(lock("elsewhere", "other"))
    first = mine.begin(permit("mine", waits=False))
    first.until_write()
    first.step()
    first.until_write()
    late = first.lose()
    assert other.do(permit("theirs", waits=True, permits=2))[0] == 1
    again = mine.begin(permit("mine", waits=False))
    again.until_write()
    other.do(Step("pool_release", ("k:hf1:holders",), ("theirs",)))
    etcd.execute("etcd", late, "channel")
    again.finish()
    mine.do(Step("pool_abandon", ("k:hf1:holders",), ("mine", "60000")))
    assert keys_of(etcd, "mine") == []


def test_a_waiter_keeps_its_place_while_another_attempt_is_given_up(etcd: Etcd) -> None:
    holder, mine = Client(etcd), Client(etcd)
    assert holder.do(lock("held", ttl=LONG))
    assert mine.do(lock("waits"))[0] == 0
    attempt = mine.begin(lock("mine", "other"))
    attempt.until_write()
    attempt.lose()
    mine.do(Step("abandon", ("other",), ("mine", "60000")))
    place = etcd.items["k:hf1:intent:lock:waits"].created
    for _ in range(30):
        etcd.now_us += 10_000_000
        assert holder.do(renew("held", ttl=LONG)) == DONE
        assert mine.do(lock("waits"))[0] == 0
    assert etcd.items["k:hf1:intent:lock:waits"].created == place


def test_two_threads_that_are_granted_a_lease_each_keep_their_places(etcd: Etcd) -> None:
    holder, mine = Client(etcd), Client(etcd)
    assert holder.do(lock("held", ttl=LONG))
    both = [mine.begin(lock("one")), mine.begin(lock("two"))]
    for running in both:
        running.send()
    for running in both:
        running.receive()
    for running in both:
        assert running.finish()[0] == 0
    places = {token: etcd.items[f"k:hf1:intent:lock:{token}"].created for token in ("one", "two")}
    for _ in range(30):
        etcd.now_us += 10_000_000
        assert holder.do(renew("held", ttl=LONG)) == DONE
        for token in ("one", "two"):
            assert mine.do(lock(token))[0] == 0
    assert {token: etcd.items[f"k:hf1:intent:lock:{token}"].created for token in ("one", "two")} == places


# A step that goes on although its caller was cancelled.


def test_a_hold_whose_hand_over_was_cancelled_can_be_extended(etcd: Etcd) -> None:
    mine = Client(etcd)
    mine.do(lock("mine"))
    assert mine.do(hand_over("mine")) == DONE, "the caller has left before it was done, and goes on holding"
    assert mine.do(renew("mine")) == DONE
    assert mine.do(renew("mine", ttl=LONG)) == DONE
    let_pass(etcd, 300.0, (mine, "mine", "k"))
    assert mine.do(release("mine")) == DONE
    assert keys_of(etcd, "mine") == []


def test_a_writer_whose_hand_over_was_cancelled_can_become_a_reader(etcd: Etcd) -> None:
    mine = Client(etcd)
    mine.do(Step("pool_acquire", ("k:hf1:holders",), ("mine", TTL, "0", "rwlock", "0 channel", "all")))
    assert mine.do(Step("pool_hand_over", ("k:hf1:holders",), ("mine", TTL, "0"))) == DONE
    assert mine.do(Step("pool_share", ("k:hf1:holders",), ("mine",))) == DONE


def test_a_hold_whose_hand_over_was_cancelled_is_not_forgotten(etcd: Etcd) -> None:
    mine = Client(etcd)
    for token, name in (("mine", "k"), ("elsewhere", "other")):
        mine.do(lock(token, name))
    assert mine.do(hand_over("mine")) == DONE, "the caller has left before it was done, and goes on holding"
    let_pass(etcd, 300.0, (mine, "mine", "k"), (mine, "elsewhere", "other"))
    assert mine.do(hand_over("elsewhere", "other")) == DONE
    assert mine.do(renew("mine")) == DONE
    etcd.now_us += 100_000_000
    mine.do(lock("third", "third"))
    mine.do(hand_over("third", "third"))
    assert mine.session.intents.keys() == {"third"}, "what has ended is forgotten"


def test_an_answered_program_does_not_undo_the_place_that_its_successor_has_made(etcd: Etcd) -> None:
    """A waiter left and passed its token on. Its request found the key gone; meanwhile the successor has a new key."""
    holder, mine = Client(etcd), Client(etcd)
    holder.do(lock("held"))
    mine.do(lock("mine"))
    stale = mine.begin(lock("mine"))
    del etcd.items["k:hf1:intent:lock:mine"]  # an operator, or a caller that holds several names
    stale.send()
    mine.do(lock("mine"))
    holder.do(release("held"))
    mine.session.call("mine")
    fence = mine.do(lock("mine"))
    assert isinstance(fence, bytes)
    stale.receive()
    stale.finish()
    assert mine.do(renew("mine")) == DONE
    assert mine.do(release("mine")) == DONE
    assert keys_of(etcd, "mine") == []


def test_a_waiter_that_left_creates_nothing_after_its_successor_has_released(etcd: Etcd) -> None:
    mine = Client(etcd)
    mine.do(lock("mine"))
    stale = mine.begin(lock("mine"))
    assert mine.do(release("mine")) == DONE
    stale.finish()
    assert keys_of(etcd, "mine") == []


def test_a_waiter_that_left_does_not_make_the_release_of_its_successor_a_loss(etcd: Etcd) -> None:
    mine = Client(etcd)
    mine.do(lock("mine"))
    stale = mine.begin(lock("mine"))
    end = mine.begin(release("mine"))
    end.step()
    end.send()
    stale.step()  # its request finds the key gone, and is answered first
    end.receive()
    assert end.reply == DONE


@pytest.mark.parametrize("at_the_create", [False, True])
def test_a_step_that_reached_no_member_does_not_forget_what_its_successor_does(etcd: Etcd, at_the_create: bool) -> None:
    mine = Client(etcd)
    mine.do(lock("elsewhere", "other"))
    etcd.now_us += 20_000_000
    stale, successor = mine.begin(lock("mine")), mine.begin(lock("mine"))
    if at_the_create:
        stale.until_write()
        successor.until_write()
    with pytest.raises(NotExecuted):
        stale.throw(not_executed())
    if at_the_create:
        successor.send()
        successor.lose()  # executed, and its answer is lost
        mine.do(abandon("mine"))
    else:
        successor.finish()
        assert mine.do(renew("mine")) == DONE
        assert mine.do(release("mine")) == DONE
    assert keys_of(etcd, "mine") == []


# Two steps of one hold beside each other.


@pytest.mark.parametrize("ending", ["release", "abandon"])
@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("order", ["extension first", "end first"])
def test_an_extension_beside_the_end_of_its_hold_leaves_nothing(
    etcd: Etcd, ending: str, before: int, order: str
) -> None:
    mine = Client(etcd)
    mine.do(lock("mine"))
    extension = mine.begin(renew("mine", ttl=LONG))
    for _ in range(before):
        if not extension.is_over:
            extension.step()
    end = mine.begin(release("mine") if ending == "release" else abandon("mine"))
    while not end.is_over and type(end.request) is Unwatch:
        end.step()
    if order == "extension first" and not extension.is_over:
        extension.step()
        extension.finish()
    reply = end.finish()
    extension.finish()
    assert (reply if ending == "release" else reply[0]) == DONE, "it was held until then"
    assert keys_of(etcd, "mine") == []


@pytest.mark.parametrize("answers", ["in order", "the first one last"])
def test_two_extensions_beside_each_other_both_count(etcd: Etcd, answers: str) -> None:
    mine = Client(etcd)
    mine.do(lock("mine"))
    short, long = mine.begin(renew("mine", ttl="120000")), mine.begin(renew("mine", ttl=LONG))
    long.until_write()
    short.until_write()
    short.send()
    if answers == "in order":
        short.receive()
    long.step()  # it finds another revision, and sends again
    long.send()
    if answers != "in order":
        long.receive()
        assert long.finish() == DONE
        short.receive()
    assert short.finish() == DONE
    assert mine.do(renew("mine", ttl=LONG)) == DONE


def test_an_extension_that_reached_no_member_beside_one_without_an_answer(etcd: Etcd) -> None:
    mine = Client(etcd)
    mine.do(lock("mine"))
    short, long = mine.begin(renew("mine", ttl="120000")), mine.begin(renew("mine", ttl=LONG))
    short.until_write()
    long.until_write()
    with pytest.raises(NotExecuted):
        short.throw(not_executed())
    long.send()
    long.lose()
    assert mine.do(abandon("mine")) == [DONE, 1]
    assert keys_of(etcd, "mine") == []


def test_a_hand_over_whose_first_lease_is_gone_hands_over(etcd: Etcd) -> None:
    """It was extended, so its keys are on a longer lease. Its create was on the first one, and so is its tombstone."""
    mine = Client(etcd)
    mine.do(lock("mine"))
    mine.do(renew("mine", ttl=LONG))
    etcd.now_us += 60_000_000
    assert mine.do(hand_over("mine", tombstone=True)) == DONE
    assert keys_of(etcd, "mine")


# A full etcd.


def test_a_permit_that_cannot_be_released_keeps_no_other_lock(etcd: Etcd) -> None:
    mine = Client(etcd)
    mine.do(permit("permit", waits=True))
    mine.do(lock("mine", "other"))
    mine.full = True
    steps = [Step("pool_abandon", ("k:hf1:holders",), ("permit", "0")), Step("abandon", ("other",), ("mine", "0"))]
    replies = Running(mine, joint_program(mine.session, steps, mine.now)).finish()
    assert isinstance(replies[0], StepFailed)
    assert replies[1] == [DONE, 1]
    assert keys_of(etcd, "mine") == []
    mine.full = False
    assert mine.do(steps[0]) == [DONE, 1]
    assert keys_of(etcd, "permit") == []


def test_a_permit_of_unknown_outcome_keeps_no_other_lock(etcd: Etcd) -> None:
    mine = Client(etcd)
    mine.do(lock("mine", "other"))
    first = mine.begin(permit("permit", waits=True))
    first.until_write()
    first.step()
    first.until_write()
    first.send()
    first.lose()
    mine.full = True
    steps = [Step("pool_abandon", ("k:hf1:holders",), ("permit", "60000")), Step("abandon", ("other",), ("mine", "0"))]
    replies = Running(mine, joint_program(mine.session, steps, mine.now)).finish()
    assert replies[1] == [DONE, 1]


def test_a_hold_is_renewed_after_an_attempt_that_a_full_etcd_has_refused(etcd: Etcd) -> None:
    mine = Client(etcd)
    mine.do(lock("held", "other"))
    mine.full = True
    with pytest.raises(NoSpace):
        mine.begin(lock("new")).finish()
    mine.do(abandon("new"))
    etcd.now_us += 10_000_000
    assert mine.do(renew("held", "other")) == DONE


# What a client remembers.


def test_a_client_forgets_an_attempt_that_reached_no_member(etcd: Etcd) -> None:
    """Else a client that goes on trying during an outage would remember every try."""
    mine = Client(etcd)
    for number in range(3):
        for step in (lock(f"t{number}"), permit(f"p{number}", waits=False), adopt(f"a{number}")):
            running = mine.begin(step)
            with pytest.raises(NotExecuted):
                running.throw(not_executed())
    assert mine.session.intents == {}
