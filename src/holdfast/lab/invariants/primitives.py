"""The further invariants of semaphores, readers-writer locks, latches, reentrant locks and elections.

Each is a function of a history, as in ``locks``. They are not part of the matrix of recipes.

| event | what happened to its client |
|---|---|
| executed | the server has executed a step of it that is in ``Config.heeds``; in ``what`` the step and its arguments |
| passed | the latch was open for it; in ``what`` the initial count |
| counted | its count_down returned: the count that is left, and the initial count |
| stands | the count on the server has changed (its client is -1): the count that is left, and the initial count |
| level | in ``what`` its acquires minus its releases, and whether its lease is "kept" or "over" |
| trespass | another task of the same client tried to release its lock, or to take it: "refused" or "let in" |
| elected | the key of the election is its own from now on; in ``what`` its fence |
| asks, told | it asks for the leader; the answer: a name and a fence, or "nobody" |
| outlives | it relies on its lease for longer than the server keeps it |
| overdue | its term has ended, it runs, and it was not notified |
| unaware | its key has been gone for too long, and it was not notified |
| old_primary | a primary that was replaced has executed a step of it, a second after all Sentinels knew the new one |
| went_back | it uses a primary again of which it knew that it was replaced |
| two_holders | it holds the lock and another client does, too, when both must know the new primary |
| torn | it holds some of the names that it wants, and not the others |
| uneven | it is in two queues with two times of arrival |
| overtaken | it is in the queues of all its names, and a client that arrived later was granted one of them |
"""

from __future__ import annotations

from typing import Final

from holdfast.lab.invariants.cache import CACHE_CHECKS
from holdfast.lab.invariants.history import BROKEN, Check, Event, History, Report, invariant, judged, never
from holdfast.lab.invariants.locks import POOL_CHECKS
from holdfast.lab.invariants.several import SEVERAL_CHECKS

PRIMITIVE_CHECKS: Final[dict[str, Check]] = {**POOL_CHECKS, **CACHE_CHECKS, **SEVERAL_CHECKS}
_COUNTS_DOWN: Final = "latch_count_down "


@invariant(PRIMITIVE_CHECKS, "OnePrimary", "old_primary", "went_back")
def one_primary(history: History) -> Report:
    """From a second after all Sentinels know the new primary, no client that can ask them uses the old one.

    And no client goes back to the old primary.
    """
    why = {
        "old_primary": "{0} uses a primary that all Sentinels know to be replaced",
        "went_back": "{0} goes back to a primary that it knows to be replaced",
    }
    return never(history, why, "granted")


@invariant(PRIMITIVE_CHECKS, "OneHolder", "two_holders")
def one_holder(history: History) -> Report:
    """Two clients do not hold the lock, once all Sentinels know the new primary and each holder has renewed there.

    What the old primary granted until a second after that is told of its loss at its next renewal.
    """
    why = "{0} holds the lock at one primary, and another client holds it at the other"
    return never(history, {"two_holders": why}, "granted")


@invariant(PRIMITIVE_CHECKS, "ShutUntilZero", "passed")
def shut_until_zero(history: History) -> Report:
    """No waiter passes a latch before it was counted down to zero."""
    asked = False
    counted: dict[str, int] = {}
    for event in history:
        _note_counted(event, counted)
        if event.kind == "passed":
            asked = True
            if sum(counted.values()) < int(event.what):
                why = f"{{0}} passes a latch of {event.what} that was counted down by {sum(counted.values())}"
                return Report(BROKEN, why, (event.client,))
    return judged(asked)


@invariant(PRIMITIVE_CHECKS, "CountedOnce", "counted", "stands")
def counted_once(history: History) -> Report:
    """Each count_down lowers a latch once, however often it is sent.

    The count that is left is the initial count minus all count_downs, and count_down returns the count left after it.
    """
    asked = False
    counted: dict[str, int] = {}
    done: dict[int, int] = {}  # by client: the sum after its first count_down
    for event in history:
        _note_counted(event, counted)
        if event.kind == "executed" and event.what.startswith(_COUNTS_DOWN):
            done.setdefault(event.client, sum(counted.values()))
        elif event.kind in ("stands", "counted"):
            asked = True
            left, total = map(int, event.what.split(" "))
            so_far = sum(counted.values()) if event.kind == "stands" else done.get(event.client, 0)
            if left != max(0, total - so_far):
                source = "the server has" if event.kind == "stands" else "{0} gets the answer"
                why = f"the latch of {total} was counted down by {so_far}, and {source} {left} left"
                return Report(BROKEN, why, (event.client,) if event.kind == "counted" else ())
    return judged(asked)


def _note_counted(event: Event, counted: dict[str, int]) -> None:
    """Count each token once, however often it arrives."""
    if event.kind == "executed" and event.what.startswith(_COUNTS_DOWN):
        _, token, _, by = event.what.split(" ")[:4]
        counted[token] = int(by)


@invariant(PRIMITIVE_CHECKS, "LevelCount", "level", "trespass")
def level_count(history: History) -> Report:
    """A reentrant lock is held until its owner has released it as often as it acquired it."""
    asked = False
    for event in history:
        if event.kind == "level":
            asked = True
            levels, lease = event.what.split(" ")
            if (int(levels) > 0) != (lease == "kept"):
                why = f"{{0}} has acquired it {levels} times more than released, and its lease is {lease}"
                return Report(BROKEN, why, (event.client,))
        elif event.kind == "trespass" and event.what != "refused":
            return Report(BROKEN, "another task of {0} is accepted as the owner of its lock", (event.client,))
    return judged(asked)


@invariant(PRIMITIVE_CHECKS, "LeaderKnown", "told")
def leader_known(history: History) -> Report:
    """A client that is reported as the leader was elected, with that fence, and no other had followed it.

    The answer that no client leads is correct only if no client led during the whole request.
    """
    asked = False
    elections = 0
    elected: dict[tuple[str, str], int] = {}  # by name and fence: how many elections came before
    over: dict[str, int] = {}  # by name: how many elections there had been when it stepped down
    known: dict[
        int, tuple[int, dict[str, int]]
    ] = {}  # by asking client: the number of elections, and ``over``, when it asked
    since: dict[int, Event] = {}  # the clients that lead, as far as they know
    led: dict[int, dict[int, Event]] = {}  # by asking client: the clients that have led since it asked
    for event in history:
        name = "ABCDEFGH"[event.client] if event.client >= 0 else ""
        if event.kind == "elected":
            if (name, event.what) not in elected or event.what == "None":  # a reservation has no fence
                elected[name, event.what] = elections
                elections += 1
        elif event.kind in ("granted", "extended"):
            if event.kind == "granted" or event.client in since:
                since[event.client] = event
                for leaders in led.values():
                    if event.client in leaders:
                        leaders[event.client] = event
        elif event.kind in ("leaves", "lost", "crashed"):
            since.pop(event.client, None)
            for leaders in led.values():
                leaders.pop(event.client, None)
        elif event.kind == "released":
            over[name] = elections
        elif event.kind == "asks":
            known[event.client] = elections, dict(over)
            led[event.client] = dict(since)
        elif event.kind == "told":
            asked = True
            if event.what == "nobody":
                for leader, grant in led[event.client].items():
                    if grant.until_us is None or grant.until_us > event.at_us:
                        why = "{0} gets the answer that there is no leader, while {1} leads"
                        return Report(BROKEN, why, (event.client, leader))
                continue
            leader_name, fence = event.what.split(" ")
            place = elected.get((leader_name, fence))
            if place is None:
                why = f"{{0}} gets the answer that {leader_name} leads, with a fence that it never had"
                return Report(BROKEN, why, (event.client,))
            then, were_over = known[event.client]
            if place + 1 < then or were_over.get(leader_name, -1) > place:
                why = f"{{0}} gets the answer that {leader_name} leads, whose term had ended before it asked"
                return Report(BROKEN, why, (event.client,))
    return judged(asked)


@invariant(PRIMITIVE_CHECKS, "StepsDown", "outlives", "overdue")
def steps_down(history: History) -> Report:
    """A leader's term ends, and it is notified, before the server can let the next one lead."""
    outlives = "{0} still leads when the server may let another client lead"
    overdue = "the term of {0} has ended, and {0} was not notified"
    return never(history, {"outlives": outlives, "overdue": overdue}, "granted")


@invariant(PRIMITIVE_CHECKS, "LossTold", "unaware")
def loss_told(history: History) -> Report:
    """A holder whose key is gone before its time is notified soon."""
    return never(history, {"unaware": "the key of {0} is gone, and {0} is not notified"}, "lost")
