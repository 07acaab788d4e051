"""The parser for what other clients wrote takes anything, never raises, and returns little, which is plain."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import untrusted
from holdfast.holder import holder_of, is_foreign, readable_of
from holdfast.lease import MAX_FENCE
from holdfast.names import keys_of
from holdfast.protocol.cache.entry import ComputeFailure, entry_of
from holdfast.protocol.inspection.history import read_entry, read_notice
from holdfast.protocol.inspection.reading import seen_in
from holdfast.protocol.intents.layout import is_writer, kind_of, read_value, times_of, token_of
from holdfast.protocol.intents.requests import Item
from holdfast.protocol.kinds.election import leader_of
from holdfast.protocol.kinds.handover import VERSION, read_ticket
from holdfast.protocol.replies import REPLIES, Inspected, Malformed
from tests.security.crafted import NASTY, RECORDS, SECRET, TOKENS, TOKENS_AT_RANDOM, check_plain

ANY_BYTES = st.one_of(RECORDS, TOKENS_AT_RANDOM, st.sampled_from([*NASTY, *TOKENS]))
ANY_TEXT = st.one_of(st.text(), ANY_BYTES.map(lambda raw: raw.decode(errors="surrogateescape")))

OF_BYTES: dict[str, Any] = {
    "kind": untrusted.kind,
    "number": untrusted.number,
    "score": untrusted.score,
    "atol": lambda raw: untrusted.atol(raw) % 10**16,
    "named": untrusted.named,
    "latch": untrusted.latch,
    "broken": untrusted.broken,
    "failure": untrusted.failure,
    "fences": lambda raw: (found := untrusted.fences(raw)) and found._replace(mark=b""),
    "place": lambda raw: (found := untrusted.place(raw)) and found._replace(request=b""),
    "holder_of": holder_of,
    "readable_of": readable_of,
    "leader_of": lambda raw: leader_of(raw, 7),
    "read_entry": read_entry,
    "read_notice": read_notice,
    "failure of a computation": lambda raw: ComputeFailure.read(raw).as_error(entry_of("k")),
}
OF_TEXT: dict[str, Any] = {
    "printable": untrusted.printable,
    "shown": lambda text: untrusted.shown(text, 100),
    "named": untrusted.named,
    "number": untrusted.number,
    "latch": untrusted.latch,
    "notification": lambda text: untrusted.notification(text.split(" ")),
    "kind of an intent": lambda text: kind_of(f"k:hf1:intent:{text}"),
    "times of an intent": lambda text: times_of(Item("k", text, 1, 1)),
    "side of an intent": lambda text: is_writer(Item("k:hf1:intent:rwlock:all:", text, 1, 1)),
}


@pytest.mark.parametrize("read", OF_BYTES)
@settings(max_examples=50)
@given(raw=ANY_BYTES)
def test_any_bytes(read: str, raw: bytes) -> None:
    check_plain(OF_BYTES[read](raw))


@pytest.mark.parametrize("read", OF_TEXT)
@settings(max_examples=50)
@given(text=ANY_TEXT)
def test_any_text(read: str, text: str) -> None:
    check_plain(OF_TEXT[read](text))


@given(text=ANY_TEXT)
def test_the_token_of_an_intent_can_be_sent(text: str) -> None:
    token = token_of(Item("k", text, 1, 1))
    assert len(token.encode()) <= 4 * untrusted.MOST_TOKEN


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ('{"token":"t","at":5,"since":6,"names":["a","b"],"fence":7,"slot":0,"shared":true}', None),
        ('{"token":5,"at":"5","since":-1,"names":"ab","fence":true,"slot":1.0,"shared":1}', {}),
        (f'{{"fence":{MAX_FENCE + 1},"at":{10**16},"slot":{10**8},"names":[],"token":""}}', {}),
        ('{"names":["a",{}]}', {}),
        ('{"names":["\\ud800"],"token":"\\ud800"}', {}),
        (f'{{"names":{["a"] * 33}}}'.replace("'", '"'), {}),
        (f'{{"at":{"9" * 5000},"token":"t"}}', {}),
        ("[" * 100_000, {}),
        ("5", {}),
    ],
    ids=range(9),
)
def test_a_field_of_an_intent_is_as_holdfast_writes_it_or_left_out(value: str, read: Any) -> None:
    found = read_value(Item("k", value, 1, 1))
    assert found == ({**found, "token": "t", "slot": 0, "shared": True} if read is None else read)
    assert (len(found) == 7) == (read is None)


@settings(max_examples=50)
@given(
    lock=st.none() | st.tuples(ANY_BYTES, st.integers(-2, 10**15), st.none() | ANY_BYTES, st.booleans()),
    holders=st.lists(st.tuples(ANY_BYTES, *[st.none() | ANY_BYTES] * 3), max_size=3),
    waiters=st.lists(st.tuples(ANY_BYTES, st.none() | ANY_BYTES, st.none() | ANY_BYTES), max_size=3),
    latch=st.none() | ANY_BYTES,
    kind=st.none() | ANY_BYTES,
)
def test_any_inspection(lock: Any, holders: Any, waiters: Any, latch: Any, kind: Any) -> None:
    reply = [
        *(1_700_000_000_000_000, kind, None if lock is None else [*lock[:3], int(lock[3])]),
        [len(holders), *(each for holder in holders for each in holder)],
        [len(waiters), *(each for waiter in waiters for each in waiter)],
        None if latch is None else [latch, 1, latch, b"1"],
        None if latch is None else [latch, 5, 1],
    ]
    found = REPLIES["inspect_lock"](reply)
    assert isinstance(found, Inspected)
    for seen in seen_in(keys_of("k"), found):
        check_plain(seen.info())


@pytest.mark.parametrize("name", sorted(REPLIES))
@settings(max_examples=20)
@given(value=ANY_BYTES, before=st.sampled_from([-2, -1, 0, 1, 2, 3]), length=st.integers(1, 5))
def test_a_crafted_value_in_a_reply_is_read_or_malformed(name: str, value: bytes, before: int, length: int) -> None:
    for reply in (value, [before, *[value] * length], [before, 1, *[value] * length], [value] * length):
        try:
            REPLIES[name](reply)
        except Malformed:
            pass


@given(raw=st.one_of(ANY_TEXT, ANY_TEXT.map(lambda text: VERSION + text)))
def test_any_ticket(raw: str) -> None:
    try:
        check_plain(repr(read_ticket(raw, "")))
    except holdfast.HoldfastError as error:
        check_plain(str(error))


def test_a_ticket_for_a_kind_that_acts_on_a_terminal_is_named_in_plain_text() -> None:
    text = b"lo\x1b[31mck\ntoken\n\nname"
    packed = urlsafe_b64encode(crc32(text).to_bytes(4, "big") + text).decode().rstrip("=")
    with pytest.raises(holdfast.Unsupported) as caught:
        read_ticket(VERSION + packed, "")
    check_plain(caught.value)


def test_what_holdfast_writes_is_read_back() -> None:
    token = b"web%2D1-4711-nightly%20job" + SECRET
    holder = holder_of(token)
    assert (holder.host, holder.pid, holder.label) == ("web-1", 4711, "nightly job")
    assert readable_of(token).encode() + SECRET == token
    assert not is_foreign(token)
    assert untrusted.fences(b"1700000000000000 64 aaaaaaaa") == (1_700_000_000_000_000, b"aaaaaaaa", None)
    assert untrusted.place(b"17 30000 3600000 any 2 channel") == (17, b"any", 2)
    assert untrusted.latch("2 3") == (2, 3)
    assert untrusted.notification(["ask", "17", "250"]) == (0, 17, 250)
    assert untrusted.notification(["5", "17", "-1"]) == (5, 17, -1)
    assert untrusted.score(b"-1700000000000000") == -1_700_000_000_000_000
    assert untrusted.failure(b"ValueError\nno such user") == ("ValueError", "no such user")


@pytest.mark.parametrize(
    ("raw", "value"),
    [(b"12", 12), (b" -12x", -12), (b"", 0), (None, 0), (b"x1", 0), (b"0" * 5000 + b"7", 7), (b"9" * 5000, 2**63 - 1)],
    ids=range(7),
)
def test_atol(raw: bytes | None, value: int) -> None:
    assert untrusted.atol(raw) == value
