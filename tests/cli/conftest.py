"""``holdfast run`` as a process, and servers for it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.shell import CLI, PATIENCE_S, environment
from tests.servers import Server


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.client().flushall()
    return shared


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that may be broken."""
    with Server() as server:
        yield server


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``holdfast run`` with these arguments. Whatever a test leaves behind is ended."""
    with contextlib.ExitStack() as stack:

        def start(url: str | Server | None, *args: str, **options: Any) -> subprocess.Popen[str]:
            where = () if url is None else ("--url", url.url if isinstance(url, Server) else url)
            process = stack.enter_context(
                subprocess.Popen(
                    [*CLI, "run", *where, *args],
                    **{
                        "stdin": subprocess.DEVNULL,
                        "stdout": subprocess.PIPE,
                        "stderr": subprocess.PIPE,
                        "text": True,
                        "env": environment(),
                        **options,
                    },
                )
            )
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def call(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., tuple[int, str, str]]:
    """Run it to its end: exit code, stdout, stderr."""

    def call(url: str | Server | None, *args: str, stdin: str | None = None, **options: Any) -> tuple[int, str, str]:
        if stdin is not None:
            options["stdin"] = subprocess.PIPE
        process = start(url, *args, **options)
        out, err = process.communicate(stdin, timeout=PATIENCE_S)
        return process.returncode, out, err

    return call
