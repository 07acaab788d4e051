"""How a reply can be wrong: named values in one list, chosen by a seed.

A garbler is given one reply as the bytes that it came in, and says what the client gets instead: pieces of bytes,
pauses in seconds, or CUT, which resets the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

__all__ = ["BROKEN", "CUT", "KINDS", "Garbler", "Piece", "frames_of"]

CUT = None
Piece = bytes | float | None

PUSHES = (
    b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nx\r\n",
    b">2\r\n$10\r\ninvalidate\r\n_\r\n",
    b">2\r\n$10\r\ninvalidate\r\n:1\r\n",
    b">3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$1\r\ny\r\n",
    b">3\r\n$7\r\nmessage\r\n$14\r\nholdfast:bell:\r\n$9\r\n1 2 3 4 5\r\n",
    b">3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n",
    b">3\r\n$11\r\nunsubscribe\r\n_\r\n:0\r\n",
    b">1\r\n:7\r\n",
    b">0\r\n",
    b">1\r\n*1\r\n>1\r\n$1\r\nx\r\n",
)
ERRORS = tuple(
    b"-" + text + b"\r\n"
    for text in (
        b"ERR garbled",
        b"",
        b"\xff\xfe",
        b"NOSCRIPT No matching script. Please use EVAL.",
        b"READONLY You can't write against a read only replica.",
        b"LOADING Valkey is loading the dataset in memory",
        b"BUSY Valkey is busy running a script.",
        b"OOM command not allowed when used memory > 'maxmemory'.",
        b"MISCONF Errors writing to the AOF file",
        b"NOPERM User default has no permissions",
        b"NOAUTH Authentication required.",
        b"WRONGPASS invalid username-password pair",
        b"WRONGTYPE Operation against a key holding the wrong kind of value",
        b"MOVED 1 127.0.0.1:1",
        b"ASK 1 127.0.0.1:1",
        b"TRYAGAIN",
        b"CLUSTERDOWN Hash slot not served",
        b"CROSSSLOT Keys in request don't hash to the same slot",
        b"MASTERDOWN Link with MASTER is down",
        b"UNKILLABLE",
        b"EXECABORT",
        b"ERR max number of clients reached",
        b"ERR unknown command 'HELLO'",
    )
)
VALUES = (
    b"+OK\r\n",
    b"+\r\n",
    b":0\r\n",
    b":1\r\n",
    b":-1\r\n",
    b":9223372036854775807\r\n",
    b":99999999999999999999\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"_\r\n",
    b"#t\r\n",
    b"#f\r\n",
    b"$0\r\n\r\n",
    b"$3\r\n-17\r\n",
    b"$3\r\ninf\r\n",
    b"*3\r\n:1\r\n$2\r\n-7\r\n:0\r\n",
    b"*5\r\n:0\r\n:-1\r\n:0\r\n:1\r\n_\r\n",
    b"*2\r\n:-2\r\n$3\r\n\xff\xfe\xfd\r\n",
)
# No step of Holdfast has a reply of such a type, so none of these can be taken for a good one.
STRANGE = (
    b",nan\r\n",
    b",inf\r\n",
    b",-inf\r\n",
    b",1.5\r\n",
    b"(123456789012345678901234567890\r\n",
    b"=7\r\ntxt:abc\r\n",
    b"%1\r\n$1\r\na\r\n:1\r\n",
    b"%1\r\n*1\r\n:1\r\n:1\r\n",
    b"~2\r\n:1\r\n:1\r\n",
    b"~1\r\n*1\r\n:1\r\n",
    b"!9\r\nERR wrong\r\n",
    b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
    b"*2\r\n-ERR inside\r\n,nan\r\n",
    b"\x00\x01\x02\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\r\n",
)
# Not among them: "*2147483647", for which hiredis makes a list of 16 GB. To free it again takes half a minute, in which
# no thread of the process runs.
HUGE = (
    b"$9999999999\r\n",
    b"$536870912\r\nabc",
    b"$99999999999999999999999\r\n",
    b"$-2\r\n",
    b"*1000000\r\n",
    b"*9999999999\r\n:1\r\n",
    b"%1073741824\r\n",
    b"*1\r\n" * 12,
)

Kind = Callable[[Random, bytes], Sequence[Piece]]


def flip(dice: Random, frame: bytes) -> Sequence[Piece]:
    position = dice.randrange(len(frame))
    return [frame[:position] + bytes([dice.randrange(256)]) + frame[position + 1 :]]


def truncate(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [frame[: dice.randrange(len(frame))]]


def truncate_and_cut(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [frame[: dice.randrange(len(frame))], CUT]


def cut(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [CUT]


def duplicate(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [frame, frame]


def swallow(dice: Random, frame: bytes) -> Sequence[Piece]:
    return []


def delay(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [dice.uniform(0.001, 0.1), frame]


def in_two_pieces(dice: Random, frame: bytes) -> Sequence[Piece]:
    position = dice.randrange(len(frame))
    return [frame[:position], 0.005, frame[position:]]


def push_before(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [dice.choice(PUSHES), frame]


def push_after(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [frame, dice.choice(PUSHES)]


def error(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [dice.choice(ERRORS)]


def value(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [dice.choice(VALUES)]


def strange(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [dice.choice(STRANGE)]


def huge(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [dice.choice(HUGE)]


def noise(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [dice.randbytes(dice.randrange(1, 64))]


def surplus(dice: Random, frame: bytes) -> Sequence[Piece]:
    return [frame, dice.choice(VALUES)]


KINDS: tuple[Kind, ...] = (
    flip,
    truncate,
    truncate_and_cut,
    cut,
    duplicate,
    swallow,
    delay,
    in_two_pieces,
    push_before,
    push_after,
    error,
    value,
    strange,
    huge,
    noise,
    surplus,
)
# What no client can take for a good reply: under these exclusion and fences must hold.
BROKEN: tuple[Kind, ...] = (truncate_and_cut, cut, delay, in_two_pieces, strange)


class Garbler:
    """Garbles some of the replies that it is given, and sometimes swaps two."""

    def __init__(self, seed: object, *, rate: float, kinds: Sequence[Kind] = KINDS) -> None:
        self._dice = Random(str(seed))
        self._rate = rate
        self._kinds = kinds
        self._kept: bytes | None = None
        self.done: list[str] = []  # what was done, for the report of a failure

    def __call__(self, frame: bytes) -> Sequence[Piece]:
        kept, self._kept = self._kept, None
        if kept is not None:
            return [frame, kept]
        if self._dice.random() >= self._rate:
            return [frame]
        if self._kinds is KINDS and self._dice.random() < 1 / (len(KINDS) + 1):
            self._kept = frame
            self.done.append("swap")
            return []
        kind = self._dice.choice(self._kinds)
        self.done.append(kind.__name__)
        return kind(self._dice, frame)


_LINES = b"+-:_#,("
_BULKS = b"$=!"
_DOUBLED = b"%|"


def frames_of(buffer: bytearray) -> list[bytes]:
    """Take the complete frames out of a buffer of honest RESP."""
    frames = []
    position = 0
    while (end := _end_of(buffer, position)) > 0:
        frames.append(bytes(buffer[position:end]))
        position = end
    del buffer[:position]
    return frames


def _end_of(buffer: bytearray, start: int) -> int:
    """Where the frame that begins there ends; 0 if more is to come."""
    wanted, position = 1, start
    while wanted:
        line_end = buffer.find(b"\r\n", position)
        if line_end < 0:
            return 0
        kind, size = buffer[position], buffer[position + 1 : line_end]
        position = line_end + 2
        wanted -= 1
        if kind in _LINES:
            continue
        count = int(size)
        if kind in _BULKS:
            position += max(count + 2, 0) if count >= 0 else 0
            if position > len(buffer):
                return 0
        else:
            wanted += max(count, 0) * (2 if kind in _DOUBLED else 1)
    return position
