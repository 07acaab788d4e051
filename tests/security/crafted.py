"""Values that another client of the server could write, and what must be true of whatever is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any

from hypothesis import strategies as st

from holdfast.holder import Holder

SECRET = b"." + b"a" * 32
LONGEST = 20_000  # characters of any text that is shown

# Each of these is text that a terminal or a log would act on, or a number that Python refuses to read.
NASTY = (
    b"9" * 5000,
    b"%0A%1B[31m",
    b"\n\x1b[31m",
    b"%C2%9B31m",
    b"\xc2\x9b31m",
    b"%E2%80%AEgnp",
    b"%ED%A0%80",
    b"\xed\xa0\x80",
    b"\xff\x00\r\n",
    b"\xd9\xa3",  # a digit, but not of ASCII
    b"-" * 100,
    b"%" * 300,
    b"x" * 10_000,
    b"broken 1 1 1 - - x",
    b"",
)
TOKENS = [
    b"host-" + b"9" * 5000 + b"-label" + SECRET,
    b"ho%0A%1B[31mst-1-la%0Abel" + SECRET,
    b"h\n\x1b[31m-1-\xc2\x9bl" + SECRET,
    b"h%E2%80%AE-1-%C2%9B31m" + SECRET,
    b"\xff\xed\xa0\x80-\xd9\xa3-x" + SECRET,
    b"x" * 10_000 + SECRET,
    b"h 0 0 - root-1-ops I did it" + SECRET,
    b"not ours \x1b[31m",
    b"9" * 5000,
]

PARTS = st.one_of(st.binary(max_size=40), st.sampled_from(NASTY))
TOKENS_AT_RANDOM = st.builds(
    lambda parts, separator, secret: separator.join(parts) + secret,
    st.lists(PARTS, min_size=1, max_size=5),
    st.sampled_from([b"-", b"-", b" ", b"."]),
    st.sampled_from([SECRET, SECRET, b""]),
)
# Records have their fields between spaces.
RECORDS = st.one_of(
    st.binary(max_size=80),
    st.builds(
        lambda parts: b" ".join(parts),
        st.lists(st.one_of(PARTS, TOKENS_AT_RANDOM, st.sampled_from([b"1", b"0", b"-1", b"ask", b"any"])), max_size=8),
    ),
)


def check_plain(found: Any) -> None:
    """Nothing in it acts on a terminal, and nothing is large."""
    for value in _leaves(found):
        if isinstance(value, str):
            assert value.isprintable(), ascii(value)
            assert len(value) <= LONGEST
        elif isinstance(value, int):
            assert abs(value) < 10**17


def _leaves(found: Any) -> Iterator[Any]:
    if is_dataclass(found) and not isinstance(found, type):
        yield str(found) if isinstance(found, Holder) else ""
        found = asdict(found)
    if isinstance(found, BaseException):
        yield str(found)
        yield repr(found)
        found = {**vars(found), "args": found.args}
    if isinstance(found, dict):
        found = [*found, *found.values()]
    if isinstance(found, list | tuple):
        for each in found:
            yield from _leaves(each)
    else:
        yield found
