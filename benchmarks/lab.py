"""What the lab can search: its speed, the fenced lock under every pair of faults, the primitives, and a question.

    python -m benchmarks.lab [--budget 60] [--each 10] [--clients 2] [--primitives 30] [--late 40]
        [--late-requests 40] [--only PART]

Six parts, each with a PASS or FAIL, and an exit code.

1. Speed: distinct states of the whole matrix within a budget, on all cores.
2. The fenced lock: for every pair of kinds of fault, two faults in any order at any step, explored completely or for
   ``--each`` seconds. Distinct states are counted over all searches: a state that two searches reach counts once.
   Faults of clients and of the network may not break any guarantee of docs/guarantees.md. A server that loses writes,
   or whose clock jumps, may break neither fences nor local deadlines.
3. The primitives: each row of lab/subjects/primitives.py with three clients and two faults of clients and messages, for
   ``--primitives`` seconds. All invariants of the row must hold, except the limits of the row, which must be found; and
   all runs without a fault must be explored. The number of faults up to which the search is complete is printed.
4. Late replies: the fenced lock and each row of the primitives with two clients, where a reply is a separate move and
   notifications of later events may overtake it, for ``--late`` seconds. No invariant may be broken, and all runs
   without a fault must be explored.
5. Late requests: each row of lab/subjects/late.py, two clients, for ``--late-requests`` seconds. No invariant may be
   broken, except the limits of the row; all runs with one late request must be explored; and every step that changes
   anything must have been late in one of the rows.
6. The question of lab/surveys/question.py.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.progress import track

from benchmarks.report import console
from holdfast.lab.report.trace import Trace
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.faults import DEFAULT_FAULTS, UNRELIABLE_SERVER
from holdfast.lab.subjects.late import missing
from holdfast.lab.subjects.rows import config_of
from holdfast.lab.surveys.common import trace_of
from holdfast.lab.surveys.primitives import LATE_REQUESTS, PRIMITIVES, Tried, try_all
from holdfast.lab.surveys.question import answers
from holdfast.lab.surveys.recipes import survey

STATES_A_MINUTE = 300_000
FENCED_STATES = 1_000_000
PAIRED = (*DEFAULT_FAULTS, "reshard")
# docs/guarantees.md does not guarantee these if a server loses acknowledged writes, if its clock jumps, or if a network
# delivers a request twice (a TCP connection never does).
NOT_GUARANTEED = {
    "MutualExclusion": UNRELIABLE_SERVER,
    "AcquireTotality": UNRELIABLE_SERVER | {"duplicate"},
    "OwnerOnlyRelease": UNRELIABLE_SERVER,
    "FencedSafety": {"clock_back"},  # together with a loss of data: fences come from the server's clock
    "FenceMonotone": {"clock_back"},
    "NoLostWakeup": UNRELIABLE_SERVER,
    "Fifo": UNRELIABLE_SERVER,
}


class Pair(NamedTuple):
    kinds: tuple[str, ...]
    clients: int
    seconds: float


class Explored(NamedTuple):
    pair: Pair
    marks: bytes
    exhausted: bool
    traces: list[Trace]


def explore(pair: Pair) -> Explored:
    config = config_of("holdfast", clients=pair.clients, kinds=pair.kinds, most_faults=2)
    explorer = Explorer(config)
    exhausted = explorer.search(2, budget=pair.seconds)
    traces = [trace_of("holdfast", broken) for broken in explorer.broken.values()]
    return Explored(pair, array("q", explorer.hashes).tobytes(), exhausted, traces)


def is_guaranteed(trace: Trace) -> bool:
    """Whether docs/guarantees.md guarantees what this trace breaks."""
    return not NOT_GUARANTEED.get(trace.invariant, frozenset()) & set(trace.faults)


def explore_all_pairs(clients: int, seconds: float) -> tuple[set[int], int, list[Trace]]:
    pairs = [Pair(kinds, clients, seconds) for kinds in itertools.combinations(PAIRED, 2)]
    marks: set[int] = set()
    exhausted = 0
    traces: dict[tuple[Any, ...], Trace] = {}
    # Forked, so that a state has the same hash in all processes; one search each, so that its memory is freed.
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for found in track(pool.imap_unordered(explore, pairs), "pairs of faults", len(pairs), console=console):
            states = array("q")
            states.frombytes(found.marks)
            marks.update(states)
            exhausted += found.exhausted
            for trace in found.traces:
                traces.setdefault((trace.invariant, *sorted(set(trace.faults))), trace)
    return marks, exhausted, list(traces.values())


def verdict(passed: bool) -> str:
    return "[green]PASS[/]" if passed else "[red]FAIL[/]"


def measure_speed(asked: argparse.Namespace) -> Iterator[bool]:
    started = time.monotonic()
    states = sum(findings.states for findings in survey(budget=asked.budget))
    took = time.monotonic() - started
    wanted = STATES_A_MINUTE * asked.budget / 60
    passed = states >= wanted
    console.print(f"the matrix: {states:,} states in {took:.0f} s (at least {wanted:,.0f})  {verdict(passed)}")
    yield passed


def search_pairs(asked: argparse.Namespace) -> Iterator[bool]:
    marks, exhausted, traces = explore_all_pairs(asked.clients, asked.each)
    pairs = len(PAIRED) * (len(PAIRED) - 1) // 2
    passed = len(marks) >= FENCED_STATES
    console.print(
        f"the fenced lock, {asked.clients} clients, 2 faults: {len(marks):,} distinct states (at least "
        f"{FENCED_STATES:,}); {exhausted} of {pairs} pairs of faults explored completely  {verdict(passed)}"
    )
    yield passed
    for trace in sorted(traces, key=lambda trace: (trace.invariant, trace.faults)):
        faults = " + ".join(trace.faults)
        console.print(f"  {trace.invariant} broken by {faults} in {trace.steps} steps", highlight=False)
    broken = [trace for trace in traces if is_guaranteed(trace)]
    console.print(f"guarantees of docs/guarantees.md that are broken: {len(broken)}  {verdict(not broken)}")
    for trace in broken:
        console.print(trace.to_json(), highlight=False, markup=False)
    yield not broken


def search_primitives(asked: argparse.Namespace) -> Iterator[bool]:
    yield from passed(try_rows([*PRIMITIVES], asked.primitives))


def passed(all_tried: Iterator[Tried]) -> Iterator[bool]:
    return (tried.is_passed for tried in all_tried)


def try_rows(rows: list[str], seconds: float, *, late: bool = False) -> Iterator[Tried]:
    """Try each of these rows for that time, and print what was found."""
    rounds = -(-len(rows) // min(os.cpu_count() or 1, len(rows)))
    for tried in try_all(rows, budget=seconds * rounds, late=late):
        console.print(f"{tried.heading}  {verdict(tried.is_passed)}", highlight=False, soft_wrap=True)
        for line in tried.details:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        for trace in tried.traces:
            console.print(trace.to_json(), highlight=False, markup=False)
        yield tried


def search_late_requests(asked: argparse.Namespace) -> Iterator[bool]:
    console.print("late requests, two clients:")
    was_late: Counter[str] = Counter()
    for tried in try_rows([*LATE_REQUESTS], asked.late_requests):
        was_late.update(tried.delayed)
        yield tried.is_passed
    for engine, (known, lacking) in missing(was_late).items():
        found = len(known) - len(lacking)
        text = f"{engine}: {found} of {len(known)} steps that change anything were late"
        text += f", not {', '.join(sorted(lacking))}" if lacking else ""
        console.print(f"{text}  {verdict(not lacking)}", highlight=False, soft_wrap=True)
        yield not lacking


def search_late_replies(asked: argparse.Namespace) -> Iterator[bool]:
    console.print("late replies, two clients:")
    yield from search_late_replies_of_the_lock(asked)
    rows = [row for row in PRIMITIVES if row != "cohort"]  # the cohort always has late replies
    yield from passed(try_rows(rows, asked.late, late=True))


def search_late_replies_of_the_lock(asked: argparse.Namespace) -> Iterator[bool]:
    kinds = tuple(kind for kind in DEFAULT_FAULTS if kind not in UNRELIABLE_SERVER)
    explorer = Explorer(config_of("holdfast", clients=2, kinds=kinds, overtaking=True))
    explored = explorer.search(0, ()) + explorer.search(1, kinds, budget=asked.late)
    depth = "1 fault" if explored == 2 else "no fault"
    passed = not explorer.broken
    console.print(f"holdfast: {explorer.states:,} states; {depth}: complete  {verdict(passed)}", highlight=False)
    yield passed


def answer_question(_: argparse.Namespace) -> Iterator[bool]:
    for answer in answers():
        console.print(f"{answer}  {verdict(answer.exhausted)}", highlight=False)
        yield answer.exhausted


PARTS = {
    "speed": measure_speed,
    "pairs": search_pairs,
    "primitives": search_primitives,
    "late": search_late_replies,
    "late-requests": search_late_requests,
    "question": answer_question,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the matrix")
    parser.add_argument("--each", type=float, default=10.0, help="seconds for each pair of faults")
    parser.add_argument("--clients", type=int, default=2, help="number of clients of the fenced lock")
    parser.add_argument("--primitives", type=float, default=30.0, help="seconds for each row of the primitives")
    parser.add_argument("--late", type=float, default=40.0, help="seconds for each row with late replies")
    parser.add_argument("--late-requests", type=float, default=40.0, help="seconds for each row with late requests")
    parser.add_argument("--only", choices=PARTS, help="run only this part")
    asked = parser.parse_args()
    parts = [PARTS[asked.only]] if asked.only else PARTS.values()
    verdicts = [each for part in parts for each in part(asked)]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
