"""Derive the blocking face of Holdfast from the asyncio face: holdfast/aio/*.py -> holdfast/blocking/*.py.

    python scripts/derive_blocking.py          write the files
    python scripts/derive_blocking.py --check  say which files differ from what this script would write; exit 1 if any

A statement whose first line has the comment ``# aio only`` is left out, and so is a line with only such a comment.
RULES change the rest, in their order. What neither can express is in differences.py, which both faces have and which
is written by hand.
"""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AIO = ROOT / "src" / "holdfast" / "aio"
BLOCKING = ROOT / "src" / "holdfast" / "blocking"
BY_HAND = "differences.py"
AIO_ONLY = "# aio only"
HEAD = "# Derived from holdfast/aio/{name} by scripts/derive_blocking.py: edit that file, then run this script.\n"

RULES = [
    # Code.
    (r"\basync (?=def|with|for)", ""),
    (r"\bawait ", ""),
    (r"\b__a(enter|exit|iter)__\b", r"__\1__"),
    (r"\b__anext__\b", "__next__"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\baclose\b", "close"),
    (r"\bR \| Awaitable\[R\]", "R"),
    (r"\bAwaitable\[(\w+)\]", r"\1"),
    (r"\baio=True\b", "aio=False"),
    (r"\bresolved, shared\.timeout\b", "resolved"),
    # Names of modules and classes.
    (r"\bholdfast\.aio\.lock\(", "holdfast.lock("),
    (r"\bholdfast\.(drivers\.)?aio\b", r"holdfast.\1blocking"),
    (r"\bredis\.asyncio\.Redis\b", "redis.Redis"),
    (r"\basyncio\.(Lock|BoundedSemaphore)\b", r"threading.\1"),
    # Docstrings.
    (
        r"\basyncio face: the same names as the blocking one, awaited\.",
        "blocking face: every method blocks its thread.",
    ),
    (r"\bthe asyncio face\b", "the blocking face"),
    (
        r", for the tasks of one event loop at a time\.",
        ". Any thread may use it, and so may a forked child, which holds nothing.",
    ),
    (
        r"what to do when the lease is lost\. A callable .*\n.* leaves the body alone\.",
        "a callable that gets the lease, in a thread of its own, when the lease is lost.",
    ),
    (r"\btask(s?)\b", r"thread\1"),
]
LEFT_OVER = re.compile(r"\b(async|await|awaits|awaited|asyncio|coroutine|task|event loop)\b")


def derive(source: str, name: str) -> str:
    text = leave_out(source)
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    left = LEFT_OVER.search(text)
    if left:
        line = text[: left.start()].count("\n")
        raise SystemExit(f"aio/{name}: no rule of {Path(__file__).name} changes {text.splitlines()[line].strip()!r}")
    text = ruff(name, text, "check", "--quiet", "--fix", "--select", "F401,I")  # imports that only asyncio needs
    return ruff(name, HEAD.format(name=name) + text, "format", "--quiet")


def leave_out(source: str) -> str:
    """The source without the statements of the asyncio face alone."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
            if AIO_ONLY in source.splitlines()[first - 1]:
                last = node.end_lineno or first
                lines[first - 1 : last] = [""] * (last - first + 1)
    return "".join(line for line in lines if not line.lstrip().startswith(AIO_ONLY))


def ruff(name: str, text: str, *command: str) -> str:
    own = 'lint.isort.known-first-party = ["holdfast"]'  # also where a module does not exist yet
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--config", own, "--stdin-filename", str(BLOCKING / name), "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"ruff {command[0]} of {name}: {done.stdout}{done.stderr}")
    return done.stdout


def main(check: bool) -> int:
    differing = 0
    names = {path.name for path in AIO.glob("*.py")} - {BY_HAND}
    for name in sorted(names):
        target = BLOCKING / name
        wanted = derive((AIO / name).read_text(), name)
        found = target.read_text() if target.exists() else ""
        if found == wanted:
            continue
        differing += 1
        if check:
            diff = difflib.unified_diff(
                found.splitlines(), wanted.splitlines(), str(target), "derived", lineterm="", n=1
            )
            print(*diff, sep="\n")
        else:
            target.write_text(wanted)
            print(f"wrote {target.relative_to(ROOT)}")
    for extra in sorted({path.name for path in BLOCKING.glob("*.py")} - names - {BY_HAND}):
        differing += 1
        print(f"{BLOCKING / extra}: aio/{extra} does not exist; delete it")
    return differing if check else 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        raise SystemExit(__doc__)
    if main(check=sys.argv[1:] == ["--check"]):
        raise SystemExit("holdfast.blocking differs from what is derived: run scripts/derive_blocking.py")
