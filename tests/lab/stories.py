"""Traces written by hand: what the drawings are tested on. The real ones come from the search."""

from __future__ import annotations

from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN
from holdfast.lab.report.trace import Cell, Findings, Moment, Trace

S = 1_000_000
MEANING = {
    "MutualExclusion": "No two clients hold the lock at the same time.",
    "FencedSafety": "A late write is refused.",
    "OwnerOnlyRelease": "Only the holder frees the lock.",
    "OwnerOnlyStretch": "Only the holder makes it last.",
    "NoFalseHold": "Who was told so holds the lock.",
    "NoOrphan": "When nobody wants the lock any more, a newcomer gets it soon.",
    "NoLostWakeup": "Nobody sleeps beside a free lock.",
    "FenceMonotone": "Numbers grow.",
    "AcquireTotality": "Every try ends somehow.",
    "Fifo": "First come, first served.",
}


def trace(recipe: str, invariant: str, *moments: Moment, clients: int = 2) -> Trace:
    return Trace(
        recipe,
        invariant,
        clients,
        faults=tuple(moment.fault for moment in moments if moment.fault),
        choices=tuple((moment.actor, number) for number, moment in enumerate(moments)),
        moments=moments,
    )


# A crash between taking the lock and giving it back: the key has no ttl, so that nothing ever removes it.
ORPHAN = trace(
    "setnx",
    "NoOrphan",
    Moment(0, "A", "takes the lock: the key was not there", "", "SETNX foo 1", "1", "1", None, ("A",)),
    Moment(2000, "A", "dies while it holds the lock", "crash", value="1", dead=("A",)),
    Moment(3000, "B", "asks for the lock and is refused", "", "SETNX foo 1", "0", "1", None, (), ("A",)),
    Moment(
        90 * S,
        "time",
        "a minute and a half goes by",
        value="1",
        dead=("A",),
        violation="The lock is free in truth, yet nobody can ever take it.",
    ),
)

# A pause longer than the ttl: two hold, and the first does not know.
PAUSE = trace(
    "set_nx",
    "MutualExclusion",
    Moment(0, "A", "takes the lock for 3 s", "", "SET foo a.1 NX PX 3000", "OK", "a.1", 3 * S, ("A",)),
    Moment(1000, "B", "is refused", "", "SET foo b.1 NX PX 3000", "nil", "a.1", 2_999_000, ("A",)),
    Moment(2000, "A", "is paused: nothing runs there", "pause", "", "", "a.1", 2_998_000, ("A",), (), ("A",)),
    Moment(3_001_000, "server", "lets the key go, whose time is over", holders=("A",), paused=("A",)),
    Moment(
        3_002_000,
        "B",
        "takes the lock for 3 s",
        "",
        "SET foo b.1 NX PX 3000",
        "OK",
        "b.1",
        3 * S,
        ("A", "B"),
        (),
        ("A",),
    ),
    Moment(
        4_000_000,
        "A",
        "goes on where it was, and writes as if it held the lock",
        value="b.1",
        ttl_us=2_002_000,
        holders=("A", "B"),
        violation="A and B hold the lock at the same time.",
    ),
)

# Three clients, a lost reply, and words that must be escaped.
HOSTILE = trace(
    "watch",
    "OwnerOnlyRelease",
    Moment(0, "A", "writes </script><b>&", "", 'SET foo "<&>"', "<OK>", "<i>&\"'</i>" * 3, None, ("A",)),
    Moment(500, "B", "asks, and the answer is lost", "lost_reply", "GET foo", "", "<i>", 1, ("A",)),
    Moment(900, "network", "something is delivered twice", "duplicate", "DEL foo", "1", None, None, ("A",)),
    Moment(1000, "C", "takes it", "", "SET foo c", "OK", "c", S, ("C",), violation="<u>C</u> & A"),
    clients=3,
)

STORIES = (ORPHAN, PAUSE, HOSTILE)
FINDINGS = [
    Findings(
        story.recipe,
        1234,
        5678,
        True,
        tuple(
            Cell(
                story.recipe,
                invariant,
                BROKEN if invariant == story.invariant else UNKNOWN if invariant == "NoOrphan" else HOLDS,
                1234567 if invariant == "Fifo" else 1234,
                story if invariant == story.invariant else None,
            )
            for invariant in MEANING
        ),
    )
    for story in STORIES
]
