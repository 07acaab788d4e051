"""Where a mistake can be planted in engines, steps and inspection, and which ones a seed draws.

There are three sorts of mistake: drop a compare, skip a call, invert a condition. In Python they are found in the
syntax tree. In Lua they are found line by line, by patterns that understand a condition on one line and a call that is
a statement of its own; what they do not understand is not drawn.

A mistake is a change of whole lines of one function. The old lines are in that function exactly once. So it can be
planted again after the code around it has changed, and a mistake that no longer applies is noticed.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["OPERATORS", "ROOT", "Mutant", "area_of", "draw", "find_mutants", "line_of", "planted"]

ROOT: Final = Path(__file__).parent.parent.parent
SOURCE: Final = "src/holdfast"
OPERATORS: Final = ("drop a compare", "skip a call", "invert a condition")
DROP, SKIP, INVERT = OPERATORS

# The first pattern that a file matches decides its area.
_AREAS: Final = (
    (
        r"protocol/inspection/|protocol/intents/inspecting\.py|lua/(inspect|break)/|lua/include/broken\.lua",
        "inspection",
    ),
    (r"engines/", "engines"),
    (r"protocol/(intents|kinds)/|protocol/(memcached|steps|mutex|replication)\.py|lua/.*\.lua", "steps"),
)


class Mutant(NamedTuple):
    file: str  # below the root of the repository
    function: str  # "Class.method"; empty for a .lua file, which is searched as a whole
    operator: str
    old: str  # whole lines
    new: str


def area_of(file: str) -> str | None:
    return next((area for pattern, area in _AREAS if re.match(f"{SOURCE}/({pattern})", file)), None)


def find_mutants(root: Path = ROOT) -> list[Mutant]:
    """Every mistake that can be drawn, in an order that depends on the code alone."""
    found: list[Mutant] = []
    for path in sorted((root / SOURCE).rglob("*")):
        file = str(path.relative_to(root))
        if path.suffix in {".py", ".lua"} and area_of(file):
            mutants = python_mutants if path.suffix == ".py" else lua_mutants
            found += mutants(file, path.read_text())
    return found


def draw(mutants: list[Mutant], seed: int, count: int) -> list[Mutant]:
    """Draw evenly: one after the other from each pair of an area and an operator."""
    chance = random.Random(seed)
    cells: dict[tuple[str | None, str], list[Mutant]] = {}
    for mutant in mutants:
        cells.setdefault((area_of(mutant.file), mutant.operator), []).append(mutant)
    order = sorted(cells, key=str)
    chance.shuffle(order)
    for cell in order:
        chance.shuffle(cells[cell])
    drawn: list[Mutant] = []
    while len(drawn) < count and any(cells.values()):
        drawn += [cells[cell].pop() for cell in order if cells[cell]]
    return drawn[:count]


def planted(source: str, mutant: Mutant) -> str:
    """The source with the mistake in it."""
    begin, end = _extent(source, mutant)
    text = source[begin:end]
    assert text.count(mutant.old) == 1, f"{mutant.file}: not there, or not just once: {mutant.old!r}"
    assert mutant.new != mutant.old
    return source[:begin] + text.replace(mutant.old, mutant.new) + source[end:]


def line_of(source: str, mutant: Mutant) -> int:
    """The number of the first line that is changed."""
    begin, _ = _extent(source, mutant)
    same = 0
    for before, after in zip(mutant.old.splitlines(), mutant.new.splitlines(), strict=False):
        if before != after:
            break
        same += 1
    return source.count("\n", 0, source.index(mutant.old, begin)) + 1 + same


def _extent(source: str, mutant: Mutant) -> tuple[int, int]:
    if not mutant.function:
        return 0, len(source)
    lines = source.splitlines(keepends=True)
    for name, node in _functions(ast.parse(source)):
        if name == mutant.function:
            begin, end = node.lineno - 1, node.end_lineno or node.lineno
            return len("".join(lines[:begin])), len("".join(lines[:end]))
    raise AssertionError(f"{mutant.file} has no function {mutant.function}")


def _functions(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """The functions of a module and the methods of its classes; what is nested in them belongs to them."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _with_context(lines: list[str], first: int, last: int, new: str, within: range) -> tuple[str, str] | None:
    """The lines ``first`` to ``last`` and what replaces them, with as many lines around them as make them unique."""
    begin, end = within.start, within.stop
    whole = "\n".join(lines[begin:end])
    up, down = first, last
    while True:
        old = "\n".join(lines[up : down + 1])
        if whole.count(old) == 1:
            return old, "\n".join([*lines[up:first], new, *lines[last + 1 : down + 1]])
        if up > begin:
            up -= 1
        elif down < end - 1:
            down += 1
        else:
            return None


# Python


def python_mutants(file: str, source: str) -> list[Mutant]:
    found: list[Mutant] = []
    lines = source.split("\n")
    for function, top in _functions(ast.parse(source)):
        begin, end = top.lineno - 1, top.end_lineno
        before = _syntax("\n".join(lines[begin:end]))
        for node in ast.walk(top):
            for operator, part, text in _python_changes(node):
                new = _replaced(lines, part, text)
                pair = _with_context(lines, part.lineno - 1, part.end_lineno - 1, new, range(begin, end))
                if pair and _syntax("\n".join(lines[begin:end]).replace(*pair)) not in {None, before}:
                    found.append(Mutant(file, function, operator, *pair))
    return found


def _syntax(function: str) -> str | None:
    """None if it cannot be compiled."""
    try:
        return ast.dump(ast.parse(textwrap.dedent(function)))
    except SyntaxError:
        return None


def _replaced(lines: list[str], part: Any, text: str) -> str:
    """The lines of ``part``, with ``text`` in its place. Columns of a syntax tree count bytes."""
    head: str = lines[part.lineno - 1].encode()[: part.col_offset].decode()
    tail: str = lines[part.end_lineno - 1].encode()[part.end_col_offset :].decode()
    return head + text + tail


def _python_changes(node: ast.AST) -> Iterator[tuple[str, Any, str]]:
    """Each operator that applies to a node: what it replaces, and by what."""
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
        yield INVERT, node.test, _inverted(node.test)
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.YieldFrom) and isinstance(node.value.value, ast.Call):
            yield SKIP, node, "yield from ()"  # it stays a generator
        elif isinstance(node.value, ast.Call | ast.Await):
            yield SKIP, node, "pass"
    if isinstance(node, ast.BoolOp) and _is_condition(node):
        for place in range(len(node.values)):
            left = [value for number, value in enumerate(node.values) if number != place]
            yield DROP, node, _unparsed(left[0]) if len(left) == 1 else ast.unparse(ast.BoolOp(node.op, left))
    if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and not node.orelse:
        leaves = isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
        yield DROP, node.test, str(not leaves)
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Compare):
        yield DROP, node.value, "True"
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            if isinstance(test, ast.Compare):
                yield DROP, test, "True"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in {"Txn", "_perform_after"} and node.args:
        yield from _txn_changes(node.args[0])


def _txn_changes(compares: ast.expr) -> Iterator[tuple[str, Any, str]]:
    """Drop one compare of a transaction on etcd, or those that an expression stands for."""
    if isinstance(compares, ast.Tuple):
        for place in range(len(compares.elts)):
            left = [one for number, one in enumerate(compares.elts) if number != place]
            yield DROP, compares, ast.unparse(ast.Tuple(left, ast.Load()))
    else:
        yield DROP, compares, "()"


def _is_condition(node: ast.BoolOp) -> bool:
    """Not ``value or default``: at least one operand says yes or no by itself."""
    return any(isinstance(value, ast.Compare | ast.UnaryOp | ast.BoolOp) for value in node.values)


def _inverted(test: ast.expr) -> str:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _unparsed(test.operand)
    return f"not ({ast.unparse(test)})"


def _unparsed(node: ast.expr) -> str:
    text = ast.unparse(node)
    return f"({text})" if isinstance(node, ast.BoolOp | ast.IfExp | ast.NamedExpr | ast.Lambda) else text


# Lua

_CONDITION: Final = re.compile(r"^(\s*(?:if|elseif|while) )(.+)( (?:then|do)(?:\s*--.*)?)$")
_CALL: Final = re.compile(r"^(\s*)([\w.]+\(.*\))(\s*--.*)?$")
_COMPARISON: Final = re.compile(r"[=~<>]=|[<>]")


def lua_mutants(file: str, source: str) -> list[Mutant]:
    lines = source.split("\n")
    found: list[Mutant] = []
    for number, line in enumerate(lines):
        for operator, new in _lua_changes(line, lines[number + 1 : number + 2]):
            pair = _with_context(lines, number, number, new, range(len(lines)))
            if pair is not None:
                found.append(Mutant(file, "", operator, *pair))
    return found


def _lua_changes(line: str, after: list[str]) -> Iterator[tuple[str, str]]:
    if condition := _CONDITION.match(line):
        head, test, tail = condition.groups()
        negated = re.fullmatch(r"not ([\w.]+)", test)
        yield INVERT, head + (negated[1] if negated else f"not ({test})") + tail
        operands = _operands(test)
        if len(operands) > 1:
            for place in range(len(operands)):
                yield DROP, head + _joined(operands, place) + tail
        elif _COMPARISON.search(test) and "while" not in head:
            leaves = any(text.lstrip().startswith("return") for text in after)
            yield DROP, head + ("false" if leaves else "true") + tail
    elif (call := _CALL.match(line)) and _is_balanced(call[2]) and not line.lstrip().startswith("return"):
        yield SKIP, f"{call[1]}do end{call[3] or ''}"


def _operands(test: str) -> list[str]:
    """The operands of ``and`` and ``or`` outside parentheses, each but the first with its operator."""
    parts, depth = [""], 0
    for word in re.split(r"( (?:and|or) )", test):
        if re.fullmatch(r" (?:and|or) ", word) and depth == 0:
            parts.append(word.lstrip())
        else:
            parts[-1] += word
        depth += word.count("(") - word.count(")")
    return parts


def _joined(operands: list[str], dropped: int) -> str:
    left = [operand for place, operand in enumerate(operands) if place != dropped]
    if dropped == 0:
        left[0] = left[0].partition(" ")[2]  # without its operator
    return " ".join(operand.strip() for operand in left)


def _is_balanced(text: str) -> bool:
    """One call, with nothing after it."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character == ")":
            return place == len(text) - 1
    return False
