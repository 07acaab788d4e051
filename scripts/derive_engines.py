"""Write the table of engines in docs/engines.md from holdfast.engines.capabilities; with --check, only compare."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.engines.capabilities import ENGINES, FEATURES

PAGE = Path(__file__).parent.parent / "docs" / "engines.md"
BEGIN, END = "<!-- engines: written by scripts/derive_engines.py -->", "<!-- engines end -->"
ROWS = {
    "URL": "url",
    "use it for": "use",
    "waiters": "queue",
    "notifications": "notifications",
    "fences": "fences",
    "a server crashes": "server_crash",
    "failover": "failover",
    "the server's clock jumps": "clock_jump",
    "partition": "partition",
}
# Features in plain words; the others are names of calls, options or commands.
PLAIN = {
    "fence": "fences",
    "a lock on several names": "locks on several names",
    "one fence for several names": "one fence for several names",
    "recipe for redis": "recipes of Redis",
    "recipe for memcached": "the recipe of memcached",
    "local waiters in inspect": "local waiters in `inspect`",
    "fences that tell the time": "fences that are times",
    "expiry within 2 s": "a lock with a ttl below 2 s free in time after a crash",
    "the keys of Redis": "exclusion of other Redis libraries",
}


def table() -> str:
    engines = list(ENGINES.values())
    lines = ["| | " + " | ".join(engine.name for engine in engines) + " |", "|---" * (1 + len(engines)) + "|"]
    for title, field in ROWS.items():
        texts = [str(getattr(engine, field)) for engine in engines]
        lines.append(f"| {title} | " + " | ".join(f"`{text}`" if field == "url" else text for text in texts) + " |")
    missing = [
        ", ".join(PLAIN.get(one, f"`{one}`") for one in FEATURES if one not in engine.features) for engine in engines
    ]
    lines.append("| not offered | " + " | ".join(text or "–" for text in missing) + " |")
    return "\n".join(lines)


def derive(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    page = PAGE.read_text()
    derived = derive(page)
    if page == derived:
        return 0
    if "--check" in sys.argv:
        print(f"{PAGE.name} differs from the declared capabilities: run python scripts/derive_engines.py")
        return 1
    PAGE.write_text(derived)
    return 0


if __name__ == "__main__":
    sys.exit(main())
