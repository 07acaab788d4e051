"""Which tests look at a mistake, those that are near and cheap first.

A mistake is looked for in the tests of its feature, then in those of its engine, then in all that ``make test`` runs.
Tests of the source alone, and those marked ``long``, are left out: a mistake is to be found by what it does, by
``make test`` or ``make test-engines``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.mutants.sites import ROOT, Mutant

__all__ = ["Run", "runs_for"]


class Run(NamedTuple):
    paths: tuple[str, ...]
    engine: str = "standalone"
    processes: int = 0


def _of_makefile(variable: str) -> tuple[str, ...]:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (found,) = re.findall(rf"^{variable} := (.*)$", text, re.MULTILINE)
    return tuple(found.split())


CONFORMANCE: Final = _of_makefile("CONFORMANCE")
SERVERS: Final = _of_makefile("SERVERS")

# Tests of the source: they read it, and do not run it.
_OF_SOURCE: Final = (
    *("tests/test_architecture.py", "tests/test_glossary.py", "tests/test_named_tests.py", "tests/test_pages.py"),
    *("tests/test_readme_zh.py", "tests/test_failover_history.py", "tests/test_pulse.py", "tests/mutants"),
)

# The engine of a file; for what all engines of Redis share, the engine that its lines speak of.
_ENGINE: Final = (
    (r".*engines/local/", "local"),
    (r".*engines/redis/cluster/", "cluster"),
    (r".*engines/redis/sentinel", "sentinel"),
    (r".*(engines/etcd/|protocol/intents/)", "etcd"),
    (r".*(engines/memcached/|protocol/memcached)", "memcached"),
    (r"(?s).*(engines/|replication).*sentinel", "sentinel"),
    (r"(?s).*(engines/|replication).*(cluster|shard)", "cluster"),
    (r"(?s).*engines/.*memcached", "memcached"),
    (r"(?s).*engines/.*etcd", "etcd"),
)

# Words of a file's path, and the tests of that feature.
_FEATURES: Final = (
    ("engines/local", ("tests/engines/local",)),
    ("redis/sentinel", ("tests/engines/redis/test_sentinel_urls.py",)),
    ("inspect|break|broken", ("tests/inspection", "tests/cli/test_operate.py")),
    ("latch", ("tests/latch",)),
    ("election", ("tests/election",)),
    ("cache|claim", ("tests/cache",)),
    ("guard", ("tests/guard",)),
    ("rlock", ("tests/rlock",)),
    ("multi|parts", ("tests/multi",)),
    ("handover|hand_over|adopt|holding|parts", ("tests/handover",)),
    ("pool|permit|semaphore|rwlock|membership", ("tests/pools",)),
    ("fence", ("tests/fences",)),
    ("replication", ("tests/drivers/test_replicas.py",)),
    ("lock/|mutex|steps|grant|queue|abandon", ("tests/contention", "tests/leases", "tests/outages", "tests/events")),
    ("redis/(aio|blocking|channels|failures|protocol|scanning)", ("tests/engines/redis", "tests/outages")),
    ("redis/(target|settings)|others|capabilities", ("tests/connections", "tests/errors", "tests/clients")),
    ("greenlets", ("tests/drivers",)),
)
_GENERAL: Final = ("tests/conformance",)
# Tests of an engine that need no server.
_ON_A_MODEL: Final = {
    "etcd": ("tests/etcd/test_given_up.py", "tests/etcd/test_search.py"),
    "memcached": ("tests/lab/test_memcached.py",),
}
_VIRTUAL_FIRST: Final = ("simulated", "search", "lab", "semantics")


def runs_for(mutant: Mutant) -> Iterator[Run]:
    near = [path for words, paths in _FEATURES if re.search(words, mutant.file) for path in paths]
    text = mutant.file + mutant.function + mutant.old
    engine = next((engine for pattern, engine in _ENGINE if re.match(pattern, text)), "")
    if engine in _ON_A_MODEL:
        first = [path for path in CONFORMANCE if path.startswith(tuple(near))]
        yield Run(_ON_A_MODEL[engine])
        yield Run(tuple(first), engine)
        yield Run((f"tests/{engine}",), processes=2)
        yield Run(tuple(path for path in CONFORMANCE if path not in first), engine, processes=2)
        if re.search(f"intents|{engine}", mutant.file):
            return  # nothing else runs its code
    if engine in {"sentinel", "cluster"}:
        yield Run((f"tests/{engine}",))
    yield Run(_in_order([*near, *_GENERAL]))
    if engine and engine not in _ON_A_MODEL:
        yield Run(CONFORMANCE, engine, processes=2)
    yield Run(("tests",), processes=3)


def _in_order(paths: list[str]) -> tuple[str, ...]:
    """Their files, those in virtual time first."""
    files = [
        str(file.relative_to(ROOT))
        for path in dict.fromkeys(paths)
        for file in ([ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("test_*.py")))
    ]
    ranks = [*_VIRTUAL_FIRST, ""]
    return tuple(sorted(files, key=lambda file: next(n for n, word in enumerate(ranks) if word in file)))


def left_out(run: Run) -> list[str]:
    """What is not to be collected."""
    outside = SERVERS if run.paths == ("tests",) else ()
    return [f"--ignore={path}" for path in (*_OF_SOURCE, *outside)]
