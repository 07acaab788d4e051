"""Common parts of all drawings of a trace: which clients have a lane, and short forms of times and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.search.faults import CLOCK, UNRELIABLE_SERVER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.lab.report.trace import Cell, Moment, Trace

OTHERS = ("server", "network", "time")


def clients_of(trace: Trace) -> list[str]:
    """The clients that act in the trace. The others get no lane."""
    seen: set[str] = set()
    for moment in trace.moments:
        seen.update((moment.actor, *moment.holders, *moment.dead, *moment.paused))
    return sorted(seen.difference(OTHERS))


def numbers_of(trace: Trace) -> list[str]:
    """The step number of each moment; empty for a moment at which only time passes."""
    found, last = [], 0
    for moment in trace.moments:
        last += moment.actor != "time"
        found.append("" if moment.actor == "time" else str(last))
    return found


def clock(us: int) -> str:
    """A time or a duration, in the unit that makes it a short number."""
    if us == 0:
        return "0 s"
    for size, unit in ((1_000_000, "s"), (1_000, "ms")):
        if abs(us) >= size:
            return f"{us / size:.4g} {unit}"
    return f"{us} µs"


def left(ttl_us: int | None) -> str:
    """The text for a key's ttl."""
    return "no ttl" if ttl_us is None else f"ttl {clock(ttl_us)}"


def count(number: int) -> str:
    """A number of states, in at most four letters."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        scaled = number / size
        if scaled >= 0.9995:
            return f"{scaled:.{0 if scaled >= 9.95 else 1}f}{unit}"
    return str(number)


def shorten(text: str, width: int) -> str:
    """The text without its middle, because values differ at their ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def sentence(moment: Moment) -> tuple[str, str]:
    """The actor, and the rest of the sentence. The actor is empty if the sentence names it."""
    actor, does = moment.actor, moment.does
    if actor == "time" or does.lower().startswith((f"{actor.lower()} ", f"{actor.lower()}'", f"the {actor}")):
        return "", does
    return f"The {actor}" if actor in OTHERS else actor, f" {does}"


def exclaim(violation: str) -> str:
    """A violation as a sentence."""
    return violation[:1].upper() + violation[1:] + ("" if violation.endswith((".", "!", "?")) else ".")


def label(fault: str) -> str:
    return fault.replace("_", " ")


def heading(cell: Cell, meaning: Mapping[str, str]) -> tuple[str, str]:
    """The heading of a drawing, and the meaning of its invariant in a sentence."""
    trace = cell.trace
    assert trace is not None
    by = ", ".join(label(fault) for fault in dict.fromkeys(trace.faults))
    steps = f"{trace.steps} step{'' if trace.steps == 1 else 's'}"
    if UNRELIABLE_SERVER & {*trace.faults}:
        jumps = UNRELIABLE_SERVER & {*trace.faults} <= CLOCK
        by += ": the server's clock jumps" if jumps else ": the server loses data"
    return f"broken in {steps} ({by or 'no fault needed'})", meaning.get(cell.invariant, "")
