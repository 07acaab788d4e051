"""Late requests: two clients, and a request that arrives at any later time, once, after its sender has given it up.

The first fault of every run is a late request; after it comes one more fault of any kind of the row. There is a row for
each row of ``primitives``, with two clients. The rows of ``_VISITS`` add what those lack, and what a late request of an
earlier hold can meet: a second hold of the same client, an extended or handed-over one, a break.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from holdfast.lab.search.site import Site
from holdfast.lab.search.state import Config
from holdfast.lab.search.visits import AT_ONCE, ask, give_back, stay
from holdfast.lab.subjects.breaking import break_hold
from holdfast.lab.subjects.cache import cache_config
from holdfast.lab.subjects.etcd import ETCD_LATCH, etcd_config, etcd_latch_config
from holdfast.lab.subjects.latch import latch_config
from holdfast.lab.subjects.pools import rwlock_config, semaphore_config
from holdfast.lab.subjects.primitives import PRIMITIVES, Primitive
from holdfast.lab.subjects.rows import crowd_config, fenced_config
from holdfast.lab.subjects.scripted import Make, visits_config
from holdfast.lab.subjects.several import make_several, several_config
from holdfast.lua import SCRIPTS
from holdfast.protocol.intents.programs import ON_ETCD

LATE: Final = "late:"


def _two(make: Make, **bounds: Any) -> Config:
    """The first two clients of a row, with a late request first. A holder leaves at once, or when its stay is over."""
    return make(**bounds)._replace(clients=2, first="delay", leaves_us=AT_ONCE)


def _broken_by_operator(make: Make, **bounds: Any) -> Config:
    """The first client of ``make``, and an operator."""
    config = make(**bounds)

    async def program(site: Site) -> None:
        await (break_hold(site) if site.machine.name == "B" else config.program(site))

    return config._replace(program=program, alike=False)


def slots_config(**bounds: Any) -> Config:
    """Two names in different slots: one client wants both, and stays; the other wants b, and then a, and does not."""
    config = several_config("ab", "b", **{"divided": True, "stay_us": 400_000, "patience": 2.0, **bounds})

    async def program(site: Site) -> None:
        for names in ("b", "a") if site.machine.name == "B" else ("ab",):
            lock = make_several(site.machine, names)
            lease = await ask(site, lock._acquire(site.config.patience))
            if lease is not None:
                site.begin(lease, what=names)
                if len(names) > 1:
                    await stay(site)
                site.leave()
                await give_back(site, lock._release())

    return config._replace(program=program)


# The first two clients of these rows would not do what the row is about.
_OF_TWO: Final[dict[str, Make]] = {
    "cohort": partial(PRIMITIVES["cohort"].config, "F1", overtaking=False),
    "latch": partial(latch_config, "VD", 1),
    "latch:barrier": partial(latch_config, "BB", 2),
    "reshard:latch": partial(latch_config, "VD", 1),
    "break": partial(PRIMITIVES["break"].config, "no"),
    "cache": partial(cache_config, "RI"),
    "cache:failing": partial(cache_config, "FI"),
    "cache:stale": partial(cache_config, "LI", ttl=0.05, stale=60.0),
}

_SEVERAL: Final = partial(several_config, "ab", "ba")
_ONE_PERMIT: Final = partial(semaphore_config, permits=1)
_WRITERS: Final = partial(rwlock_config, "WW")
_WRITER_AND_READER: Final = partial(rwlock_config, "WR")

_LOCK: Final = PRIMITIVES["crowd"].invariants
_UNORDERED: Final = PRIMITIVES["hand_over"].invariants
_BROKEN: Final = PRIMITIVES["break"].invariants
_PERMITS: Final = PRIMITIVES["semaphore"].invariants
_MODES: Final = PRIMITIVES["rwlock"].invariants
_ON_ETCD: Final = PRIMITIVES["etcd"].invariants

# The kinds of lock that are held, released and handed over: how each is made, and its invariants.
_KINDS: Final[dict[str, tuple[Make, tuple[str, ...]]]] = {
    "lock": (fenced_config, _UNORDERED),
    "several": (_SEVERAL, _UNORDERED),
    "semaphore": (_ONE_PERMIT, _PERMITS),
    "rwlock": (_WRITERS, _MODES),
    "etcd:lock": (etcd_config, _ON_ETCD),
    "etcd:several": (partial(etcd_config, _SEVERAL), _ON_ETCD),
    "etcd:semaphore": (partial(etcd_config, _ONE_PERMIT), _PERMITS),
    "etcd:rwlock": (partial(etcd_config, _WRITERS), _MODES),
}
_VISITS: Final = {
    "again": ("asrar", "ar"),
    "extend": ("a+s-r", "ar"),
    "give_up": ("asr", "irar"),
    "hand_over": ("ah", "tsr"),
    "to_and_fro": ("ahptsr", "th"),
}
# What only some kinds have: how the lock is made, what each client does, the invariants.
_OTHERS: Final[dict[str, tuple[Make, tuple[str, str], tuple[str, ...]]]] = {
    "lock": (fenced_config, ("asr", "asr"), _LOCK),
    "leave": (fenced_config, ("alar", "ar"), _UNORDERED),
    "leave:semaphore": (_ONE_PERMIT, ("alar", "ar"), _PERMITS),
    "fences": (partial(fenced_config, fence_retention=1.0), ("asr", "asr"), _LOCK),
    "downgrade:read": (_WRITER_AND_READER, ("adsr", "ar"), _MODES),
    "downgrade:write": (_WRITERS, ("adsr", "ar"), _MODES),
    # The holder stays until the etcd lease of a waiter must be renewed.
    "etcd:crowd": (partial(etcd_config, crowd_config, stay_us=2_900_000), ("asr", "asr"), _ON_ETCD),
    "break:again": (fenced_config, ("asrar", "opo"), _BROKEN),
    "break:semaphore": (_ONE_PERMIT, ("asrar", "opo"), _PERMITS[1:]),
    "etcd:downgrade:read": (partial(etcd_config, _WRITER_AND_READER), ("adsr", "ar"), _MODES),
    "etcd:downgrade:write": (partial(etcd_config, _WRITERS), ("adsr", "ar"), _MODES),
    "etcd:break": (etcd_config, ("asrar", "opo"), tuple(name for name in _ON_ETCD if name in _BROKEN)),
    "etcd:break:semaphore": (partial(etcd_config, _ONE_PERMIT), ("asrar", "opo"), _PERMITS[1:]),
}

LATE_REQUESTS: Final[dict[str, Primitive]] = {
    **{
        f"{LATE}{name}": row._replace(config=partial(_two, _OF_TWO.get(name, row.config)))
        for name, row in PRIMITIVES.items()
    },
    **{
        f"{LATE}{kind}:{visit}": Primitive(partial(_two, partial(visits_config, make, *letters)), invariants)
        for kind, (make, invariants) in _KINDS.items()
        for visit, letters in _VISITS.items()
    },
    **{
        f"{LATE}{name}": Primitive(partial(_two, partial(visits_config, make, *visits)), invariants)
        for name, (make, visits, invariants) in _OTHERS.items()
    },
    f"{LATE}break:cache": Primitive(
        partial(_two, partial(_broken_by_operator, partial(cache_config, "RR"))),
        ("NewerStays", "NoOrphan", "NoLostWakeup"),
    ),
    f"{LATE}slots": Primitive(
        partial(_two, slots_config), ("NameExclusion", "NoFalseHold", "NoOrphan", "NoLostWakeup", "AcquireTotality")
    ),
    f"{LATE}etcd:latch": Primitive(partial(_two, partial(etcd_latch_config, "VD", 1)), ETCD_LATCH),
    f"{LATE}etcd:latch:barrier": Primitive(partial(_two, partial(etcd_latch_config, "BB", 2)), ETCD_LATCH),
}

SUBJECTS: Final = {**PRIMITIVES, **LATE_REQUESTS}  # all rows

# The steps that change nothing, and those that no row can send: recipes free their key by ``free`` (the matrix has late
# requests, too), and guards write through the caller's own client.
_ONLY_READ: Final = frozenset({"election_leader", "inspect_lock", "pool_find", "pool_look"})
_NOT_OF_A_ROW: Final = frozenset({"free", "guard_write"})


def missing(was_late: Mapping[str, int]) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """By engine: the steps (on memcached, the commands) that change anything, and those of them that were never late.

    ``was_late``: how often each was late, by the names of search/site.py.
    """
    on_etcd = {step for name in was_late if name.startswith("etcd ") for step in name.split(" ")[1].split("+")}
    known = {
        "redis": frozenset(SCRIPTS) - _ONLY_READ - _NOT_OF_A_ROW,
        "etcd": frozenset(step for step in ON_ETCD if step.islower()) - _ONLY_READ,  # others are commands that read
        "memcached": frozenset({"add", "cas", "md"}),
    }
    found = {"redis": {*was_late}, "etcd": on_etcd, "memcached": {*was_late}}
    return {engine: (steps, steps - found[engine]) for engine, steps in known.items()}
