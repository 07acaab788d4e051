"""CPython's own tests of its locks, with ours as the lock.

They come from the interpreter's ``test`` package; where a distribution leaves that out, they are skipped by name.
The asyncio ones are read from source and changed in a few ways, because a lock beyond the process cannot do otherwise:
``release`` and ``locked`` are awaited (in a plain callback a task does that), a pause of one loop turn becomes a short
one in time, and such a pause follows the wait for a cancelled task, at whose end asyncio's lock is the next one's
already. What a test asserts may come true a little later, if the server is busy. Assertions about the private
``_waiters`` are left out. Where a test goes through all primitives of asyncio, each is our lock.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import itertools
import textwrap
import unittest
import warnings
from typing import Any

import pytest

import holdfast
import holdfast.aio
from tests.servers import Server

# What speaks of CPython's internals, and not of how a lock behaves.
LEFT_OUT = {
    "test_at_fork_reinit": "calls the private _at_fork_reinit()",
    "test_repr of asyncio": "asks for asyncio's own wording",
    "test_lock_doesnt_accept_loop_parameter": "is about the constructors of asyncio's classes",
}

lock_tests = pytest.importorskip("test.lock_tests", reason="this Python comes without its test package")
asyncio_tests = pytest.importorskip("test.test_asyncio.test_locks", reason="this Python comes without its test package")

PRIMITIVES = {f"asyncio.{name}()" for name in ("Lock", "Condition", "Semaphore", "BoundedSemaphore")}

numbers = itertools.count()
THREADING = [name for name in dir(lock_tests.LockTests) if name.startswith("test_") and name not in LEFT_OUT]
ASYNCIO = [
    name
    for name in dir(asyncio_tests.LockTests)
    if name.startswith("test_") and name not in LEFT_OUT and name != "test_repr"
]


@pytest.mark.filterwarnings("ignore:a lease on:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", THREADING)
def test_threading(name: str, client: holdfast.Client) -> None:
    class Tests(lock_tests.LockTests):  # type: ignore[misc, name-defined]
        locktype = staticmethod(lambda: client.lock(f"{{cpython}}:{next(numbers)}"))

    with client.lock("{cpython}:warm"):
        pass  # the threads of the keeper and of the one node start here, so that no test counts them as leaked
    run_case(Tests(name))


class _ForALockBeyondTheProcess(ast.NodeTransformer):
    in_callback = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.in_callback = True
        self.generic_visit(node)
        self.in_callback = False
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called, text = node.func, ast.unparse(node)
        if isinstance(called, ast.Attribute) and called.attr in ("release", "locked"):
            return (
                ast.parse(f"asyncio.ensure_future({text})", mode="eval").body if self.in_callback else ast.Await(node)
            )
        if text == "asyncio.sleep(0)":
            return ast.parse("asyncio.sleep(0.1)", mode="eval").body
        if text in PRIMITIVES:
            return ast.parse("make_lock()", mode="eval").body
        if text == "self.assertRaises(RuntimeError, lock.release)":
            return ast.parse("await self.assert_release_fails(lock)", mode="eval").body
        return node

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        if ast.unparse(node.items[0]) != "self.assertRaises(asyncio.CancelledError)":
            return node
        return [node, *ast.parse("await asyncio.sleep(0.1)", mode="single").body]

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if "_waiters" in ast.unparse(node) else self.generic_visit(node)


def patient(tree: Any) -> Any:
    """Let an assertion of the test itself come true a little later; one within a task is left alone."""
    test = tree.body[0]
    test.body = [later for statement in test.body for later in _asserted_patiently(statement)]
    return ast.fix_missing_locations(tree)


def _asserted_patiently(statement: ast.stmt) -> list[ast.stmt]:
    text = ast.unparse(statement)
    if not text.startswith("self.assert"):
        return [statement]
    again = f"try:\n        {text}\n        break\n    except AssertionError:\n        await asyncio.sleep(0.1)"
    return ast.parse(f"for _ in range(50):\n    {again}\nelse:\n    {text}").body


@pytest.mark.filterwarnings("ignore:a lease on:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ASYNCIO)
def test_asyncio(name: str, server: Server) -> None:
    source = textwrap.dedent(inspect.getsource(getattr(asyncio_tests.LockTests, name)))
    tree = patient(_ForALockBeyondTheProcess().visit(ast.parse(source)))
    clients: list[holdfast.aio.Client] = []

    def make_lock() -> holdfast.aio.Lock:
        clients.append(holdfast.aio.connect(server.url))
        return clients[-1].lock(f"cpython:{next(numbers)}")

    scope: dict[str, Any] = {"asyncio": asyncio, "make_lock": make_lock}
    exec(compile(tree, name, "exec"), scope)

    class Tests(unittest.IsolatedAsyncioTestCase):
        async def asyncTearDown(self) -> None:
            for client in clients:
                await client.aclose()

        async def assert_release_fails(self, lock: holdfast.aio.Lock) -> None:
            with self.assertRaises(RuntimeError):
                await lock.release()

    setattr(Tests, name, scope[name])
    run_case(Tests(name))


def run_case(case: unittest.TestCase) -> None:
    result = unittest.TestResult()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.run(result)
        gc.collect()  # these tests drop locks that they hold; the warnings about that belong here
    problems = [text for _, text in result.errors + result.failures]
    assert result.testsRun == 1
    assert not problems, problems[0]
    assert not result.skipped, result.skipped


def test_what_is_left_out_still_exists() -> None:
    known = {*dir(lock_tests.LockTests), *dir(asyncio_tests.LockTests)}
    assert {name.removesuffix(" of asyncio") for name in LEFT_OUT} <= known
    assert len(THREADING) >= 15
    assert len(ASYNCIO) >= 9
