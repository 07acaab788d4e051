"""Which part may import which, read from the source.

errors, options, lease, names <- protocol <- drivers, engines <- blocking, aio <- cli, and protocol <- lab <- cli.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "holdfast"
MODULES = sorted(SRC.rglob("*.py"))

FACE = {
    *(
        "decorated",
        "drivers",
        "engines",
        "errors",
        "events",
        "face",
        "holder",
        "lease",
        "options",
        "protocol",
        "statistics",
        "url",
    ),
}

# A part may import itself, what is in its own row, and nothing else of Holdfast.
MAY_IMPORT = {
    "untrusted": {"lease"},
    "holder": {"untrusted"},
    "errors": {"holder"},
    "events": {"errors", "holder"},
    "metrics": {"errors", "events"},
    "otel": {"errors", "events"},
    "names": {"errors", "untrusted"},
    "url": {"errors", "options", "translations"},
    "lua": set(),
    "lease": {"protocol"},  # for the types of annotations only
    "translations": {"errors"},
    "options": {"errors", "holder", "names", "translations", "untrusted"},
    "guard": {"errors", "lease", "lua", "names", "options", "untrusted"},
    "decorated": {"errors", "lease", "options", "protocol"},
    "face": {"errors", "lease", "names", "options", "protocol", "translations"},
    "protocol": {"errors", "events", "holder", "lease", "names", "options", "untrusted"},
    "engines": {"errors", "lua", "names", "options", "protocol", "url", "untrusted"},
    "statistics": {"protocol"},
    "drivers": {"engines", "errors", "events", "holder", "lease", "protocol", "statistics"},
    "blocking": FACE,
    "aio": FACE,
    "lab": {
        "engines",
        "errors",
        "events",
        "holder",
        "lease",
        "lua",
        "names",
        "options",
        "protocol",
        "statistics",
    },  # engines for replays on a real server
    "__main__": {"cli"},
    "cli": {
        *(
            "aio",
            "blocking",
            "drivers",
            "errors",
            "guard",
            "holder",
            "lab",
            "names",
            "options",
            "protocol",
            "untrusted",
            "url",
        ),
        "__init__",
    },  # names and protocol for the doctor, which asks the server what no client asks
    "__init__": {
        "aio",
        "blocking",
        "decorated",
        "errors",
        "guard",
        "metrics",
        "otel",
    },  # aio and guard when they are first used
}
NEVER_IN_PROTOCOL = {"time", "threading", "asyncio", "random", "secrets", "socket", "redis", "os", "signal"}
ONLY_IN_ENGINES_AND_DRIVERS = {"redis", "hiredis", "httpx", "httpcore", "pymemcache"}


def part_of(module: Path) -> str:
    return module.relative_to(SRC).parts[0].removesuffix(".py")


def imports_of(module: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module by its dotted name, and whether only a type checker sees it."""
    tree = ast.parse(module.read_text())
    for_types = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in for_types
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            assert node.module is not None
            if node.module == "holdfast":
                for alias in node.names:
                    yield f"holdfast.{alias.name}", node in for_types
            else:
                yield node.module, node in for_types


def test_every_part_is_known() -> None:
    assert {part_of(module) for module in MODULES} <= set(MAY_IMPORT)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(SRC)))
def test_imports_go_one_way(module: Path) -> None:
    part = part_of(module)
    for name, for_types in imports_of(module):
        if name.split(".")[0] != "holdfast":
            continue
        imported = name.split(".")[1] if "." in name else "__init__"
        if imported == part:
            continue
        allowed = MAY_IMPORT[part]
        if not (SRC / imported).exists() and not (SRC / f"{imported}.py").exists():
            imported = "__init__"  # a name that holdfast itself exports
        assert imported in allowed, f"{module.name} imports {name}"
        if part == "lease" and imported == "protocol":
            assert for_types, "lease is below protocol, and may only borrow its types"
        if part == "__init__" and imported in ("aio", "guard"):
            assert for_types, "who imports holdfast has not asked for that"


@pytest.mark.parametrize("module", sorted((SRC / "protocol").rglob("*.py")), ids=lambda module: module.name)
def test_protocols_touch_no_clock_no_thread_no_socket_and_no_dice(module: Path) -> None:
    touched = {name.split(".")[0] for name, _ in imports_of(module)} & NEVER_IN_PROTOCOL
    assert not touched


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(SRC)))
def test_other_libraries_stay_at_the_edge(module: Path) -> None:
    if part_of(module) not in ("engines", "drivers"):
        assert not {name.split(".")[0] for name, _ in imports_of(module)} & ONLY_IN_ENGINES_AND_DRIVERS


@pytest.mark.parametrize("module", sorted((SRC / "protocol").rglob("*.py")), ids=lambda module: module.name)
def test_only_effects_yields_to_the_driver(module: Path) -> None:
    bare = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Yield)]
    yields = module.name in ("effects.py", "requests.py")  # to drivers; and to engines, from the steps on etcd
    assert bool(bare) == yields, f"a bare yield in {module.name}"


@pytest.mark.parametrize("module", sorted((SRC / "protocol").rglob("*.py")), ids=lambda module: module.name)
def test_protocols_never_catch_what_a_crash_is_made_of(module: Path) -> None:
    """A closed generator has crashed; a protocol that caught GeneratorExit could clean up after its own death."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "a bare except"
            assert "BaseException" not in ast.unparse(node.type)
            assert "GeneratorExit" not in ast.unparse(node.type)


@pytest.mark.parametrize("module", sorted((SRC / "protocol").rglob("*.py")), ids=lambda module: module.name)
def test_protocol_modules_open_with_their_theory(module: Path) -> None:
    docstring = ast.get_docstring(ast.parse(module.read_text()))
    assert docstring
    if module.name not in ("__init__.py", "effects.py"):
        assert "Invariant." in docstring


@pytest.mark.parametrize("script", sorted((SRC / "lua").rglob("*.lua")), ids=lambda script: script.name)
def test_lua_files_say_what_they_are(script: Path) -> None:
    head = script.read_text()
    for word in ("KEYS", "ARGV", "Returns", "One step"):
        assert word in head
    assert "KEYS[" in head or "-- include pool.lua" in head
    assert ".." not in "".join(line for line in head.splitlines() if "redis.call" in line), "keys only through KEYS"


def test_no_lua_hides_in_python() -> None:
    for module in MODULES:
        if part_of(module) != "lab":
            assert "redis.call" not in module.read_text(), module


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(SRC)))
def test_a_module_can_be_read_in_one_sitting(module: Path) -> None:
    assert len(module.read_text().splitlines()) <= 400


def test_a_folder_can_be_seen_at_once() -> None:
    folders = {path.parent for path in SRC.rglob("*") if path.suffix in (".py", ".lua")}
    counts = {folder: sum(path.suffix in (".py", ".lua") for path in folder.iterdir()) for folder in folders}
    crowded = {str(folder.relative_to(SRC)): count for folder, count in counts.items() if count > 16}
    assert crowded == {}, "15 modules and __init__.py"


# Where a value that another client wrote would otherwise be decoded. Each of these reads something else: a cached value
# by the user's serializer, a ticket, one of our own keys, a reply to SCAN, an answer of the server itself.
DECODES = {"untrusted.py", "protocol/cache/entry.py", "protocol/kinds/handover.py", "protocol/replies.py"}
DECODES |= {"protocol/inspection/locks.py", "protocol/inspection/breaking.py", "protocol/wait/notifications.py"}
DECODES |= {"protocol/intents/inspecting.py", "protocol/cache/computation.py"}
_DECODING = {"decode", "loads", "unquote", "isdecimal", "isdigit"}


def test_what_other_clients_wrote_is_decoded_by_one_module() -> None:
    found = set()
    for module in MODULES:
        if part_of(module) in ("protocol", "holder", "untrusted", "errors", "events", "names"):
            names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(ast.parse(module.read_text()))}
            if names & _DECODING:
                found.add(str(module.relative_to(SRC)))
    assert found == DECODES
