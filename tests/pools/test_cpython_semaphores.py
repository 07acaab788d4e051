"""CPython's own tests of its semaphores, with ours as the semaphore.

They come from the interpreter's ``test`` package; where a distribution leaves that out, they are skipped by name.
Threads get an adapter: a Permit becomes True, and ``release(n)`` releases n times. The asyncio ones are read from
source and changed in a few ways, because a semaphore beyond the process cannot do otherwise: ``release`` and ``locked``
are awaited, a pause of one loop turn becomes a short one in time, a semaphore that begins with 0 permits is one whose
two permits are taken, what a test asserts may come true a little later, and assertions about the private ``_waiters``
and ``_value`` are left out.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import sys
import textwrap
import unittest
from typing import Any

import pytest

import holdfast
import holdfast.aio
from tests.conformance.test_cpython_locks import patient, run_case
from tests.servers import Server

# What speaks of CPython's internals, or of semaphores that count without bound.
LEFT_OUT = {
    "test_repr": "asks for CPython's own wording",
    "test_acquire_fifo_order_2": "releases twice in a row, when only one permit was there to be released",
}
if sys.version_info >= (3, 13):
    LEFT_OUT["test_acquire_fifo_order_4"] = "releases three times, when none was taken"

lock_tests = pytest.importorskip("test.lock_tests", reason="this Python comes without its test package")
asyncio_tests = pytest.importorskip("test.test_asyncio.test_locks", reason="this Python comes without its test package")

numbers = itertools.count()
THREADING = [
    name for name in dir(lock_tests.BoundedSemaphoreTests) if name.startswith("test_") and name not in LEFT_OUT
]
ASYNCIO = [name for name in dir(asyncio_tests.SemaphoreTests) if name.startswith("test_") and name not in LEFT_OUT]


class Adapter:
    """Ours, with the arguments and results of threading's."""

    def __init__(self, client: holdfast.Client, value: int) -> None:
        self._semaphore = client.semaphore(f"cpython:{next(numbers)}", value)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._semaphore.acquire(blocking, timeout) is not None

    def release(self, n: int = 1) -> None:
        for _ in range(n):
            self._semaphore.release()

    def __enter__(self) -> bool:
        return bool(self._semaphore.__enter__())

    def __exit__(self, *error: Any) -> None:
        self._semaphore.__exit__(*error)


@pytest.mark.filterwarnings("ignore:a lease on:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", THREADING)
def test_threading(name: str, client: holdfast.Client) -> None:
    class Tests(lock_tests.BoundedSemaphoreTests):  # type: ignore[misc, name-defined]
        semtype = staticmethod(lambda value=1: Adapter(client, value))

    with client.lock("cpython:warm"):
        pass  # the keeper's thread starts here, so that none of the tests counts it as leaked
    run_case(Tests(name))


class _ForASemaphoreBeyondTheProcess(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        return ast.AsyncFunctionDef(**{field: getattr(node, field) for field in node._fields})

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called, text = node.func, ast.unparse(node)
        if text in ("make_semaphore(0)", "make_semaphore(value=0)"):
            return ast.parse("await make_taken()", mode="eval").body
        if text in ("asyncio.sleep(0)", "asyncio.sleep(0.01)"):  # here it takes some messages to stand in the queue
            return ast.parse("asyncio.sleep(0.2)", mode="eval").body
        if text == "self.assertRaises(ValueError, sem.release)":
            return ast.parse("await self.assert_release_fails(sem)", mode="eval").body
        if isinstance(called, ast.Attribute) and called.attr in ("release", "locked"):
            return ast.Await(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if ast.unparse(node) in ("asyncio.Semaphore", "asyncio.BoundedSemaphore"):
            return ast.Name("make_semaphore", ast.Load())
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        text = ast.unparse(node)
        return None if "._waiters" in text or "._value" in text else self.generic_visit(node)


@pytest.mark.filterwarnings("ignore:a lease on:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ASYNCIO)
def test_asyncio(name: str, server: Server) -> None:
    source = textwrap.dedent(inspect.getsource(getattr(asyncio_tests.SemaphoreTests, name)))
    tree = patient(_ForASemaphoreBeyondTheProcess().visit(ast.parse(source)))
    clients: list[holdfast.aio.Client] = []

    def make_semaphore(value: int = 1) -> holdfast.aio.Semaphore:
        clients.append(holdfast.aio.connect(server.url))
        return clients[-1].semaphore(f"cpython:{next(numbers)}", value)

    async def make_taken() -> holdfast.aio.Semaphore:
        semaphore = make_semaphore(2)
        await semaphore.acquire()
        await semaphore.acquire()
        return semaphore

    scope: dict[str, Any] = {"asyncio": asyncio, "make_semaphore": make_semaphore, "make_taken": make_taken}
    exec(compile(tree, name, "exec"), scope)

    class Tests(unittest.IsolatedAsyncioTestCase):
        async def asyncTearDown(self) -> None:
            for client in clients:
                await client.aclose()

        async def assert_release_fails(self, semaphore: holdfast.aio.Semaphore) -> None:
            with self.assertRaises(ValueError):
                await semaphore.release()

    setattr(Tests, name, scope[name])
    run_case(Tests(name))


def test_what_is_left_out_still_exists() -> None:
    assert LEFT_OUT.keys() <= {*dir(lock_tests.BoundedSemaphoreTests), *dir(asyncio_tests.SemaphoreTests)}
    assert len(THREADING) >= 9
    assert len(ASYNCIO) >= 10
