"""What a server answers: the values of RESP2, and how it writes numbers."""

from __future__ import annotations

import math


class Status(str):
    """A simple string such as ``OK``. The value of a key is always ``bytes`` instead."""

    __slots__ = ()


class ReplyError(Exception):
    """An error reply. Commands raise it; the sender of the command gets it as a value."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def code(self) -> str:
        """The text up to the first space, the only part that programs should rely on."""
        return self.message.partition(" ")[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplyError) and self.message == other.message

    def __hash__(self) -> int:
        return hash(self.message)


Reply = int | bytes | None | Status | ReplyError | list["Reply"]

OK = Status("OK")
OOM = "OOM command not allowed when used memory > 'maxmemory'."
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"

# A larger whole number is not written with all digits, but as the shortest text that means the same number.
_LARGEST_WRITTEN_WHOLE = 2**62


def format_number(number: float) -> bytes:
    """A number as the server writes it: a score, or a Lua number that is passed to a command.

    Whole numbers get no exponent in the range that matters to us (microseconds since 1970 are about 1.8e15),
    although Lua's own ``tostring`` gives them one. If a number needs 16 or 17 digits, the last digits may differ from
    those of the server.
    """
    if not math.isfinite(number):
        return b"-nan" if math.isnan(number) else b"inf" if number > 0 else b"-inf"
    if number == int(number) and abs(number) <= _LARGEST_WRITTEN_WHOLE:
        return b"-0" if number == 0 and math.copysign(1, number) < 0 else b"%d" % int(number)
    sign = "-" if number < 0 else ""
    return (sign + _layout(*_shortest_digits(abs(float(number))))).encode()


def _shortest_digits(number: float) -> tuple[str, int]:
    """The fewest digits that identify the number, and the power of ten of the last one."""
    mantissa, _, exponent = f"{number!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = fraction.rstrip("0")
    power = int(exponent or 0) - len(fraction)
    digits = (whole + fraction).lstrip("0")
    kept = digits.rstrip("0")
    return kept, power + len(digits) - len(kept)


def _layout(digits: str, power: int) -> str:
    """The digits with the decimal point, or with an exponent, as the server writes them."""
    magnitude = power + len(digits) - 1
    if power >= 0 and magnitude < len(digits) + 7:
        return digits + "0" * power
    if power < 0 and (power > -7 or abs(magnitude) < 4):
        before = len(digits) + power
        return f"{digits[:before]}.{digits[before:]}" if before > 0 else f"0.{'0' * -before}{digits}"
    point = "." if len(digits) > 1 else ""
    return f"{digits[0]}{point}{digits[1:]}e{magnitude:+d}"
