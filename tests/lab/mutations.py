"""Known mistakes, to be planted into the fenced lock one at a time.

A mistake is a change of text, in a .lua step or in a function of a protocol: it says what one could have written there,
and nothing else. The text that it replaces must be there exactly once. So when the code moves on, a mistake that no
longer applies is noticed; it does not quietly plant nothing.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable
from hashlib import sha1
from typing import Any, Final, NamedTuple

import pytest

from holdfast.lab.search import server
from holdfast.lab.search.site import Site
from holdfast.lab.simulation import machine
from holdfast.lab.simulation.machine import Machine
from holdfast.lua import SCRIPTS, Script
from holdfast.protocol import keepalive, mutex
from holdfast.protocol.hold import Hold
from holdfast.protocol.kinds.parts import StepInParts
from holdfast.protocol.wait import presence
from holdfast.protocol.wait.cohort import Cohorts
from holdfast.protocol.wait.notifications import NotificationRouter
from holdfast.protocol.wait.presence import Crowd
from holdfast.protocol.wait.waiting import WaitLoop

__all__ = ["IN_A_CLUSTER", "IN_THE_WORLD", "LINE_BY_LINE", "MISTAKES", "Mistake", "plant"]


class Text(NamedTuple):
    """One text for another: in a step by its name, or in a function of a module or class."""

    owner: Any  # the module or class; None for a step
    name: str
    old: str  # empty for a step that there was not before
    new: str


Mistake = tuple[Text, ...]


def in_step(names: str, old: str, new: str) -> Mistake:
    """In these .lua steps. What they include is part of each, and has to be changed in each."""
    return tuple(Text(None, name, old, new) for name in names.split())


def new_step(name: str, source: str) -> Mistake:
    return (Text(None, name, "", source),)


def in_python(owner: Any, name: str, old: str, new: str) -> Mistake:
    return (Text(owner, name, old, new),)


def plant(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: dict[tuple[int, str], str] = {}  # of functions that were changed before, by this mistake
    for text in mistake:
        if text.owner is None:
            before = SCRIPTS[text.name].source.decode() if text.old else ""
            source = (_changed(before, text) if text.old else text.new).encode()
            # A search loads all of SCRIPTS into its server, and sends a step by the sha that it finds there.
            monkeypatch.setitem(SCRIPTS, text.name, Script(source, sha1(source).hexdigest().encode()))
        else:
            function = getattr(text.owner, text.name)
            place = id(text.owner), text.name
            before = sources.get(place) or textwrap.dedent(inspect.getsource(function))
            sources[place] = _changed(before, text)
            monkeypatch.setattr(text.owner, text.name, _compiled(function, sources[place]))


def _changed(source: str, text: Text) -> str:
    assert source.count(text.old) == 1, f"{text.name}: not there, or not just once: {text.old!r}"
    assert text.new != text.old
    return source.replace(text.old, text.new)


def _compiled(function: Callable[..., Any], source: str) -> Any:
    """A function of the same module, with that source."""
    # Annotations stay unread, as they do in the module: some name what only the type checker knows.
    flags = __future__.annotations.compiler_flag
    code = compile(source, f"<{function.__qualname__}, with a mistake>", "exec", flags=flags, dont_inherit=True)
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    return made[function.__name__]


_COMPARED: Final = """if owner ~= ARGV[1] then
  return owner and -1 or 0
end
"""
_IS_THERE: Final = """if not owner then
  return 0
end
"""
_IF_FREE: Final = "if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then"
_QUEUE_OR_TOMBSTONE: Final = "redis.call('EXISTS', KEYS[5], KEYS[3])"
_AT_LEAST_THE_TIME: Final = """  local fence = now_us
  if last and last >= now then
    fence = string.format('%.0f', last + 1)
    retention_ms = math.min(retention_ms + math.ceil((fence - now) / 1000), MAX_RETENTION_MS)
    retention_ms = string.format('%.0f', retention_ms)
  end
"""
_VALID_FOR_ITS_TTL: Final = "lasts = granted_at + ttl - drift(ttl + since)"
_EXTENDED: Final = "hold.prolong(seconds, asked_at)"
_EXTENDED_FROM_THE_REPLY: Final = "hold.prolong(seconds, (yield from clock()))"
_INCLUDING: Final = "acquire release abandon"  # the steps with include/fence.lua and include/queue.lua

# Whose it is.
_OWNERSHIP: Final[dict[str, Mistake]] = {
    "release_without_compare": in_step("release", _COMPARED, _IS_THERE),
    "release_that_compares_one_step_before": (
        *in_step("release", _COMPARED, _IS_THERE),
        *new_step("look", "return redis.call('GET', KEYS[1]) == ARGV[1] and 1 or 0"),
        *in_python(
            mutex,
            "release",
            "        freed, _, resent, _ = yield from until_answered(",
            """        look = Step("look", hold.keys.shared, (hold.token,))
        if not (yield from until_answered(lambda: look, hold.options))[0]:
            raise hold.lost_error(LOSS_REASON[0])
        freed, _, resent, _ = yield from until_answered(""",
        ),
    ),
    "abandon_without_compare": in_step("abandon", "if owner == ARGV[1] then", "if owner then"),
    "renew_without_compare": in_step("renew", _COMPARED, _IS_THERE),
    # So that one under way while its lease is given back brings it to life again: a watchdog that outlives its lock.
    "renew_that_writes_the_key": in_step("renew", _COMPARED, "redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])\n"),
    "acquire_that_overwrites": in_step("acquire", _IF_FREE, _IF_FREE.replace(" 'NX',", "")),
    "acquire_that_does_not_know_its_own_token": in_step("acquire", "(not owner or owner == ARGV[1])", "not owner"),
}

# For how long.
_TIME: Final[dict[str, Mistake]] = {
    "ttl_touched_by_a_loser": in_step(
        "acquire",
        "local left_ms = redis.call('PTTL', KEYS[1])",
        "redis.call('PEXPIRE', KEYS[1], ARGV[2])\nlocal left_ms = redis.call('PTTL', KEYS[1])",
    ),
    "acquire_without_expiry": in_step("acquire", _IF_FREE, _IF_FREE.replace(", 'PX', ARGV[2]", "")),
    "grant_without_expiry": in_step(
        _INCLUDING, "redis.call('SET', KEYS[1], token, 'PX', ttl_ms)", "redis.call('SET', KEYS[1], token)"
    ),
    "expiry_by_the_clients_clock": (
        *in_step("acquire", _IF_FREE, _IF_FREE.replace("'PX', ARGV[2]", "'PXAT', ARGV[7]")),
        *in_python(
            mutex,
            "_ask",
            'call(hold.steps.acquire_step(hold, channel, watched != ""), timeout)',
            """call(hold.steps.acquire_step(hold, channel, watched != "")._replace(
            args=(
                *hold.steps.acquire_step(hold, channel, False).args,
                str(round(((yield from __import__("holdfast.protocol.effects").protocol.effects.wall_clock())
                    + hold.options.ttl) * 1000)),
            )
        ), timeout)""",
        ),
    ),
    "already_mine_without_a_fresh_ttl": in_step(
        "acquire", "elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then", "elseif false then"
    ),
    "already_mine_that_makes_it_shorter": in_step(
        "acquire", "elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then", "else"
    ),
    "renew_that_makes_it_shorter": (
        *in_step("renew", "left_ms >= 0 and (left_ms < ttl_ms or ARGV[3])", "left_ms >= 0"),
        *in_step("renew", "string.format('%.0f', math.max(left_ms, ttl_ms))", "ARGV[2]"),
    ),
    "validity_counted_from_the_reply": in_python(
        mutex, "_ask", "hold.grant(reply.fence, now, reply.slot)", "hold.grant(reply.fence, (yield from clock()))"
    ),
    "renewal_counted_from_the_reply": in_python(
        keepalive, "_renew", "hold.prolong(ttl, asked_at)", "hold.prolong(ttl, now)"
    ),
    "extension_counted_from_the_reply": in_python(mutex, "extend", _EXTENDED, _EXTENDED_FROM_THE_REPLY),
    "grant_taken_after_its_deadline": in_python(mutex, "_ask", "if (yield from clock()) < hold.deadline:", "if True:"),
    "ttl_counted_from_when_its_notification_is_received": in_python(
        Hold, "accept", _VALID_FOR_ITS_TTL, "lasts = now + ttl - drift(ttl)"
    ),
    "held_without_a_look_at_the_clock": in_python(
        Hold, "valid", "self.phase is HELD and now < self.deadline", "self.phase is HELD"
    ),
    "renewal_beyond_max_hold": in_python(
        Hold, "prolong", "min(self.lasts_until, self.max_hold_ends)", "self.lasts_until"
    ),
}

# In which order, and who is told.
_WAITING: Final[dict[str, Mistake]] = {
    "no_retry_after_arming_the_bell": in_python(
        WaitLoop,
        "run",
        "yield from self._subscribe(now)\n                    now = yield from clock()",
        "yield from self._subscribe(now)\n                    now = yield from self.sleep(now + REFRESH)",
    ),
    "waiter_that_trusts_its_bell": in_python(
        mutex, "pause_for", "    pause = REFRESH if", "    return 60.0\n    pause = REFRESH if"
    ),
    "renewal_that_forgets_a_push_before_its_reply": (
        *in_python(keepalive, "_renew", "            hold.check_at = _NEVER\n", ""),
        *in_python(
            keepalive,
            "_renew",
            "hold.prolong(ttl, asked_at)",
            "hold.prolong(ttl, asked_at); hold.check_at = _NEVER",
        ),
    ),
    "notification_forgotten_when_a_reply_comes_after_it": in_python(
        mutex,
        "_ask",
        "    hold.refuse(reply, now,",
        '    hold.waiter = type(hold.waiter)(None, {None: "active"})\n    hold.refuse(reply, now,',
    ),
    "waiter_that_does_not_look_when_its_listener_was_cut": in_python(
        NotificationRouter, "look_again", "if waiter.token not in asleep:", "if False:"
    ),
    "waiter_that_does_not_look_when_the_key_was_written": in_python(
        NotificationRouter, "touched", "if waiter is not None:", "if False:"
    ),
    "release_that_does_not_grant_to_the_next": in_step("release", "read_time()\nfree_or_grant(first_waiter())\n", ""),
    "abandon_that_does_not_grant_to_the_next": in_step(
        "abandon", "if freed == 1 then\n  grant_next()\nelseif was_first then", "if was_first then"
    ),
    "newcomer_that_barges_in": in_step("acquire", _QUEUE_OR_TOMBSTONE, "redis.call('EXISTS', KEYS[5])"),
    "waiter_that_loses_its_place_with_each_refresh": in_step(
        "acquire", "redis.call('ZADD', KEYS[3], 'NX', arrival(),", "redis.call('ZADD', KEYS[3], arrival(),"
    ),
}

# With which number.
_FENCES: Final[dict[str, Mistake]] = {
    "fence_from_a_bare_counter": in_step(
        _INCLUDING,
        _AT_LEAST_THE_TIME,
        "  local fence = string.format('%.0f', (last or 0) + 1)\n",
    ),
    "fence_that_is_the_same_for_all": in_python(
        mutex, "_ask", "hold.grant(reply.fence, now, reply.slot)", "hold.grant(1, now)"
    ),
    "fence_from_the_time_alone": in_step(_INCLUDING, "if last and last >= now then", "if false then"),
    "grant_with_the_last_fence": in_step(
        _INCLUDING,
        "local fence = mint(token, last, fences, retention_ms)",
        "local fence = string.match(redis.call('GET', KEYS[2]), '^%d+')",
    ),
    "pass_with_the_same_fence": in_python(Hold, "inherit", "giver.fence + 1", "giver.fence"),
    "fences_that_are_not_set_aside": in_step(_INCLUDING, "fence .. ' ' .. fences .. ' '", "fence .. ' 1 '"),
}

# Among the tasks of one client.
_COHORTS: Final[dict[str, Mistake]] = {
    "pass_of_what_is_given_back_as_well": in_python(
        Cohorts,
        "pass_on",
        "self._finish_promotion(successor, hold)\n    return True",
        "self._finish_promotion(successor, hold)\n    return False",
    ),
    "seat_that_is_left_without_a_call": in_python(Cohorts, "deactivate", "self._promote_next(local_key, hold)", "pass"),
}

# Where the keeper speaks for the waiters.
_CROWDS: Final[dict[str, Mistake]] = {
    "present_that_lets_a_waiter_without_a_place_sleep": in_step(
        "present", "type(owner) == 'table' then\n    return true", "type(owner) == 'table' then\n    return false"
    ),
    "present_that_does_not_see_a_free_lock": in_step(
        "present", "if not owner or owner == token or", "if owner == token or owner and"
    ),
    "present_that_does_not_show_presence": in_step("present", "  redis.call('HSET', KEYS[4], token, entry)\n", ""),
    "keeper_that_wakes_no_waiter": in_python(
        presence, "_wake", "if crowd.members.get(hold.token) is hold:", "if False:"
    ),
    "waiter_of_a_crowd_that_is_not_cleaned_up_after": in_python(
        mutex, "settle", "if not buried:", "if not buried and not hold.waiter.crowded:"
    ),
}

# And what is left behind.
_UNKNOWN_OUTCOMES: Final[dict[str, Mistake]] = {
    "token_forgotten_before_the_reply": in_python(
        mutex,
        "is_settled",
        "hold.fence or hold.waiter.queued or hold.outcome_unknown",
        "hold.fence or hold.waiter.queued",
    ),
    "place_in_the_queue_forgotten": in_python(
        mutex,
        "is_settled",
        "hold.fence or hold.waiter.queued or hold.outcome_unknown",
        "hold.fence or hold.outcome_unknown",
    ),
    "acquire_that_ignores_the_tombstone": (
        *in_step("acquire", _QUEUE_OR_TOMBSTONE, "redis.call('EXISTS', KEYS[3])"),
        *in_step("acquire", "if found > (front and 1 or 0) then", "if false then"),
    ),
    "abandon_without_a_tombstone": in_python(
        mutex, "abandon_step", "if hold.outcome_unknown or tombstone else 0", "if False else 0"
    ),
    "release_in_doubt_without_a_tombstone": in_python(
        mutex,
        "release",
        "return abandon_step(hold) if hold.outcome_unknown else hold.steps.release_step(hold)",
        "return hold.steps.release_step(hold)",
    ),
    "interrupted_release_that_is_not_settled": in_python(
        mutex, "release", "    except STOPPED:\n        yield from settle(hold)\n        raise\n", ""
    ),
}

_IN_POOLS: Final = "pool_abandon pool_acquire pool_adopt pool_release pool_renew"  # with include/pool.lua
_KEEPS_THE_KIND: Final = "  keep_queue(ms, slot)\n"

# What takes a late reply, a clock that is set back, or a long hold to be seen: scenarios of the world, not a search.
# tests/lab/test_world_mutations.py has them.
IN_THE_WORLD: Final[dict[str, Mistake]] = {
    "keeper_that_forgets_a_wakeup_before_its_wait": (  # a machine of the world has its own name for ``keep``
        *in_python(machine, "keep", "        registry.wakeup.clear()\n", ""),
        *in_python(
            machine,
            "keep",
            "            if not registry.closed:\n",
            "            registry.wakeup.clear()\n            if not registry.closed:\n",
        ),
    ),
    "renewal_when_a_third_is_left": in_python(
        keepalive, "due_at", "deadline - options.renewed_with", "deadline - options.renewed_with / 2"
    ),
    "roll_back_of_the_first_slot_only": in_python(
        StepInParts,
        "_clean_up",
        "zip(acquired, self._replies, strict=True)",
        "list(zip(acquired, self._replies, strict=True))[:1]",
    ),
    "kept_name_that_is_given_back_to_nobody": in_step(
        "multi_acquire",
        "    if not owner or owner == token then\n      grant_next()",
        "    if not owner then\n      grant_next()",
    ),
    "abandon_that_tells_no_next_waiter": in_step("abandon", "elseif was_first then", "elseif false then"),
    "presence_reply_of_another_length_taken_for_an_answer": in_python(
        keepalive, "show_presence", "if len(codes) != len(holds):", "if False:"
    ),
    "present_that_does_not_see_the_end_of_a_lease": in_step("present", "left_ms < SOON_MS", "left_ms < 0"),
    "present_that_brings_back_a_waiter_that_has_left": in_step(
        "present",
        "  local arrived = request and",
        """  if not request then
    request, channel = ' 3000 3600000 64 ', ' bell:two'
    redis.call('ZADD', KEYS[3], now_us, token)
  end
  local arrived = request and""",
    ),
    "keeper_that_looks_for_waiters_once": in_python(Crowd, "is_due", "self.due_at = now + EVERY", "self.due_at = 1e9"),
    "present_that_does_not_see_the_first_in_a_pool": in_step(
        "present", "      return first == token\n", "      return false\n"
    ),
    "present_that_keeps_a_dead_waiter_of_a_pool": in_step(
        "present", "    remove_waiter(first)\n", "    return false\n"
    ),
    "present_that_cuts_the_kind_of_a_room_short": in_step(
        "present", "if redis.call('PTTL', KEYS[3]) < QUEUE_MS then", "if true then"
    ),
    "kind_of_a_room_that_ends_before_its_holder": in_step(_IN_POOLS, _KEEPS_THE_KIND, ""),
    "kind_of_a_room_of_which_half_is_kept": in_step(
        _IN_POOLS, _KEEPS_THE_KIND, "  redis.call('PEXPIRE', KEYS[4], ms)\n"
    ),
    "presence_that_ends_with_a_clock_set_back": in_step(
        _INCLUDING, "math.abs(now - seen) <= PRESENCE_US", "now - seen <= PRESENCE_US"
    ),
}

# What takes two threads: tests/contention/test_line_by_line.py.
LINE_BY_LINE: Final[dict[str, Mistake]] = {
    "pass_of_a_lease_that_is_just_being_lost": in_python(
        Cohorts, "_promote", "if self._deactivating.setdefault(hold, _ENDER) is not _ENDER:", "if False:"
    ),
}

MISTAKES: Final[dict[str, Mistake]] = {
    **_OWNERSHIP,
    **_TIME,
    **_WAITING,
    **_FENCES,
    **_COHORTS,
    **_CROWDS,
    **_UNKNOWN_OUTCOMES,
}

_FOLLOWS: Final = "self.requests[number] = request._replace(number=number), answer"

# What takes a slot that moves: tests/lab/test_resharding.py. Those of an engine are planted in the lab's model of it.
IN_A_CLUSTER: Final[dict[str, Mistake]] = {
    "waiter_that_stays_subscribed_on_the_old_node_and_trusts_that": (
        *_WAITING["waiter_that_trusts_its_bell"],
        *in_python(
            Machine, "lose_listener", "    self.router.armed = False\n    self.do(self.router.look_again)\n", ""
        ),
        *in_python(Machine, "lose_listener", "self.do(self._listen_again)", "None"),
    ),
    "engine_that_takes_moved_for_a_grant": in_python(Site, "_follow", _FOLLOWS, "answer([b'%d' % number])"),
    "engine_that_follows_moved_with_a_new_token": in_python(
        Site,
        "_follow",
        _FOLLOWS,
        """again = tuple(op._replace(args=(self.machine.new_token(""), *op.args[1:])) for op in request.ops)
    self.requests[number] = request._replace(number=number, ops=again), answer""",
    ),
    "engine_that_takes_tryagain_for_an_answer": in_python(
        server,  # it has its own name for this function
        "perform",
        "    if isinstance(reply, ReplyError):\n",
        """    if isinstance(reply, ReplyError):
        if reply.code == "TRYAGAIN":
            return b"1"
""",
    ),
    "release_that_is_told_to_try_again_and_does_not": (
        *in_python(
            mutex,
            "release",
            "    except StepFailed as failed:\n        yield from defer_cleanup(hold)\n",
            "    except StepFailed as failed:\n",
        ),
        *in_python(mutex, "until_answered", "            if pause is None:\n", "            if True:\n"),
    ),
}
