"""What is run, and what is promised."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Final

from benchmarks.contention.contenders import AIO, AIO_WITHOUT_WAITING, BLOCKING, HOLDFAST, REDIS_PY, Contender
from benchmarks.contention.contest import Contest, Scenario
from benchmarks.contention.field import Field, Run, Setting, Waiting
from benchmarks.contention.relay import DELAY_S, Figures
from benchmarks.report import Figure, Spread, spread_of

__all__ = [
    "CONTESTS",
    "Crowd",
    "crowd_figures",
    "figures_of",
    "overlap_figure",
    "relay_figure",
    "run_crowd",
    "waiting_figure",
]

THREADS: Final = Scenario("threads", "16 threads of one process, one lock", Setting(False, 1, 16, 1), BLOCKING)
MIXED: Final = Scenario("mixed", "4 processes of 4 threads, one lock", Setting(False, 4, 4, 1), BLOCKING)
PROCESSES: Final = Scenario(
    "processes", "8 processes of one thread, one lock", Setting(False, 8, 1, 1), BLOCKING, in_turn=True
)
TASKS_APART: Final = Scenario("apart", "64 tasks, a lock each", Setting(True, 1, 64, 64), AIO_WITHOUT_WAITING)
TASKS: Final = Scenario("tasks", "64 tasks, one lock", Setting(True, 1, 64, 1), AIO)


def over_a_link(scenario: Scenario) -> Scenario:
    """The same scenario through the relay."""
    return scenario._replace(
        key=f"{scenario.key}-far",
        title=f"{scenario.title}, {DELAY_S * 1000:g} ms away",
        setting=scenario.setting._replace(is_far=True),
    )


FAR_THREADS, FAR_MIXED, FAR_PROCESSES, FAR_TASKS = map(over_a_link, (THREADS, MIXED, PROCESSES, TASKS))
CONTESTS: Final = [THREADS, MIXED, PROCESSES, TASKS_APART, TASKS, FAR_THREADS, FAR_MIXED, FAR_PROCESSES, FAR_TASKS]

CROWD_OF_TASKS: Final = 10_000
CROWD_OF_THREADS: Final = 1_000
REFRESHES_PER_S: Final = 2.0
MOST_REFRESHES_PER_S: Final = 2.2  # a refresh may come a little early, never late


def several(contest: Contest, at_least: float) -> Figure:
    best = contest.best_peer
    times = contest.times(best)
    return Figure(
        f"{contest.scenario.title}: acquisitions per second",
        f"{times.median:.2f} times the best peer's, {best.contender.name}, p10..p90 {times.p10:.2f}..{times.p90:.2f}",
        f"at least {at_least:g}",
        times.median >= at_least,
    )


def changes(contest: Contest, at_least: float) -> Figure:
    best = contest.best_changer
    times = contest.times_changes(best)
    return Figure(
        f"{contest.scenario.title}: changes of owner per second",
        "none were seen"
        if times is None
        else f"{times.median:.2f} times the best peer's, {best.contender.name}, "
        f"p10..p90 {times.p10:.2f}..{times.p90:.2f}",
        f"at least {at_least:g}",
        times is not None and times.median >= at_least,
    )


def requests(contest: Contest, at_most: float) -> Figure:
    counted = contest.ours.requests
    return Figure(
        f"{contest.scenario.title}: requests per acquisition",
        "none were counted" if counted is None else f"{counted:.3g}",
        f"at most {at_most:g}",
        counted is not None and counted <= at_most,
    )


def fairness(contest: Contest, at_least: float) -> Figure:
    jains = [run.jain for run in contest.ours.runs]
    return Figure(
        f"{contest.scenario.title}: Jain's fairness index",
        f"{contest.ours.jain:.3f}, in the worst round {min(jains):.3f}",
        f"at least {at_least:g}",
        contest.ours.jain >= at_least,
    )


def wait_beside_redis_py(contest: Contest, at_most: float) -> Figure:
    """Compare with the setting of redis-py that has the shorter wait, even if the other has more acquisitions."""
    theirs = [one for one in contest.standings.values() if one.contender.library == REDIS_PY]
    part = contest.wait_beside(theirs, 0.99)
    at_defaults = contest.wait_beside([one for one in theirs if one.contender.is_default], 0.99)
    return Figure(
        f"{contest.scenario.title}: p99 wait",
        f"{contest.ours.wait(0.99) * 1000:.3g} ms, {part.median:.2f} of redis-py's under its better setting "
        f"({at_defaults.median:.2f} at its defaults)",
        f"at most {at_most:g}",
        part.median <= at_most,
    )


def first_come(contest: Contest) -> Figure:
    turns = contest.ours.counted.turns if contest.ours.counted else None
    return Figure(
        f"{contest.scenario.title}: strict FIFO",
        f"{turns.out_of_turn:,} of {turns.grants:,} grants out of turn" if turns else "no order was seen",
        "none",
        turns is not None and turns.grants > 0 and turns.out_of_turn == 0,
    )


def figures_of(contest: Contest) -> list[Figure]:
    """What is promised for this contest."""
    promises: dict[str, Callable[[], list[Figure]]] = {
        THREADS.key: lambda: [
            several(contest, 8),
            changes(contest, 8),
            requests(contest, 0.2),
            fairness(contest, 0.95),
        ],
        MIXED.key: lambda: [
            several(contest, 4),
            changes(contest, 4),
            fairness(contest, 0.9),
            wait_beside_redis_py(contest, 0.2),
        ],
        PROCESSES.key: lambda: [
            several(contest, 1.4),
            changes(contest, 1.2),
            requests(contest, 4),
            first_come(contest),
        ],
        TASKS_APART.key: lambda: [several(contest, 5)],
        TASKS.key: lambda: [several(contest, 30), changes(contest, 30)],
        FAR_THREADS.key: lambda: [several(contest, 10), changes(contest, 10)],
        FAR_MIXED.key: lambda: [several(contest, 10), changes(contest, 10)],
        FAR_PROCESSES.key: lambda: [
            several(contest, 1),
            changes(contest, 1.2),
            wait_beside_redis_py(contest, 0.5),
        ],
        FAR_TASKS.key: lambda: [several(contest, 10), changes(contest, 10)],
    }
    return promises[contest.scenario.key]()


def overlap_figure(runs: list[Run]) -> Figure:
    """No overlap in any run of Holdfast. Overlaps of other libraries are in the tables, without a verdict."""
    overlaps, acquisitions = sum(run.overlaps for run in runs), sum(run.acquisitions for run in runs)
    errors = [error for run in runs for error in run.errors]
    return Figure(
        "two holders at once, or a fence that did not rise",
        f"{overlaps:,} times in {acquisitions:,} acquisitions"
        + (f", and {len(errors):,} errors: {errors[0]}" if errors else ""),
        "never",
        not overlaps and not errors and acquisitions > 0,
    )


@dataclass
class Crowd:
    """Ten thousand tasks compared with sixty-four, and a thousand threads, on one lock."""

    few: list[Run] = dataclass_field(default_factory=list)
    many: list[Run] = dataclass_field(default_factory=list)
    threads: list[Run] = dataclass_field(default_factory=list)

    @property
    def part(self) -> Spread:
        """The rate of ``many`` divided by the rate of ``few``, within each round."""
        return spread_of([many.rate / max(few.rate, 1e-9) for few, many in zip(self.few, self.many, strict=True)])


def run_crowd(field: Field, rounds: int, window: float, show: Callable[[str], None]) -> Crowd:
    crowd = Crowd()
    ours = Contender(HOLDFAST)
    settings = [(crowd.few, TASKS.setting), (crowd.many, TASKS.setting._replace(participants=CROWD_OF_TASKS))]
    for number in range(rounds):
        for runs, setting in random.sample(settings, 2):
            show(f"round {number + 1} of {rounds}: {setting.participants:,} tasks")
            runs.append(field.run(ours, setting, window))
    show(f"{CROWD_OF_THREADS:,} threads")
    crowd.threads.append(field.run(ours, THREADS.setting._replace(participants=CROWD_OF_THREADS), window))
    return crowd


def crowd_figures(crowd: Crowd) -> list[Figure]:
    connections = max(run.connections or 0 for run in crowd.many)
    errors = [error for run in crowd.many for error in run.errors]
    threads = crowd.threads[0]
    served = sum(count > 0 for count in threads.counts)
    return [
        Figure(
            f"{CROWD_OF_TASKS:,} tasks, one lock: acquisitions per second",
            f"{crowd.part.median:.2f} of those of 64 tasks, p10..p90 {crowd.part.p10:.2f}..{crowd.part.p90:.2f}"
            + (f", and {len(errors):,} errors: {errors[0]}" if errors else ""),
            "at least 0.75",
            crowd.part.median >= 0.75 and not errors,
        ),
        Figure(f"{CROWD_OF_TASKS:,} tasks, one lock: connections", f"{connections}", "one", connections == 1),
        Figure(
            f"{CROWD_OF_THREADS:,} threads, one lock",
            f"{len(threads.errors):,} errors, {threads.rate:,.0f} acquisitions per second to {served:,} of them"
            + (f": {threads.errors[0]}" if threads.errors else ""),
            "no error",
            not threads.errors and threads.handovers > 0,
        ),
    ]


def relay_figure(capacity: Figures, runs: list[Run]) -> Figure:
    """The relay must not be the bottleneck."""
    seen = [run.relayed for run in runs if run.relayed is not None]
    most, busiest = max(one.rate for one in seen), max(one.busy for one in seen)
    return Figure(
        "the relay",
        f"forwarded at most {most:,.0f} chunks per second, and was busy {busiest:.0%} of the time; "
        f"flooded, it forwards {capacity.rate:,.0f} at {capacity.busy:.0%}",
        "busy less than 80%",
        busiest < 0.8,
    )


def waiting_figure(waiting: Waiting) -> Figure:
    """A waiter only sends refreshes at its interval. In addition, the first waiter has its key tracked."""
    per_s = waiting.refreshes.total() / waiting.waiters / waiting.seconds
    most = max(waiting.refreshes.values(), default=0)
    others = {kind: count for kind, count in waiting.kinds.items() if kind not in ("EVALSHA", "CLIENT CACHING")}
    # Only the first waiter has its key tracked, so that the server notifies it if a foreign client releases the lock.
    # This needs one CLIENT CACHING with each refresh.
    tracked = waiting.kinds["CLIENT CACHING"]
    in_time = per_s <= MOST_REFRESHES_PER_S and most <= MOST_REFRESHES_PER_S * waiting.seconds + 1
    return Figure(
        f"{waiting.waiters} waiting processes: requests of each per second",
        f"{per_s:.2f} refreshes, at most {most} by one in {waiting.seconds:.1f} s, {tracked} tracked"
        + "".join(f", {count} {kind}" for kind, count in others.items())
        + (f", and {len(waiting.errors)} errors: {waiting.errors[0]}" if waiting.errors else ""),
        f"{REFRESHES_PER_S:g}, and nothing else",
        in_time and not others and not waiting.errors and waiting.scripts == 1 and tracked <= most + 1,
    )
