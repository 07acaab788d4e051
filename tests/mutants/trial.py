"""One mistake on trial: planted in a copy of the tree, and looked for by the tests.

A test finds it if it fails with the mistake, fails again alone, and passes alone without it. So neither a test that
fails now and then nor a busy machine can find a mistake. A mistake that makes a program hang is found if the time limit
of a test says so; a run that does not end in time has found nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Self

import psutil

from tests.mutants.selection import Run, left_out, runs_for
from tests.mutants.sites import ROOT, Mutant, planted

__all__ = ["Tree", "Verdict", "try_mutant"]

_NOT_COPIED: Final = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis")
_ONE_TEST: Final = 130.0  # the limit of a test in pyproject.toml, and the start of pytest


class Verdict(NamedTuple):
    found_by: str = ""  # the test
    engine: str = ""
    why: str = ""
    seconds: float = 0.0
    not_ended: bool = False
    doubtful: tuple[str, ...] = ()  # tests that failed, but not for the mistake alone


class Tree:
    """A copy of the working tree, in which mistakes are planted one after the other."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)
        self.root = Path(self._folder.name) / "tree"
        shutil.copytree(ROOT, self.root, ignore=_NOT_COPIED, symlinks=True)
        self._report = Path(self._folder.name) / "failed"
        self._changes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @contextmanager
    def with_mistake(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / mutant.file
        before = path.read_text()
        self._write(path, planted(before, mutant))
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own: compiled files are compared by whole seconds and by size."""
        path.write_text(text)
        self._changes += 1
        then = time.time() - 1_000_000 + self._changes
        os.utime(path, (then, then))

    def pytest(self, run: Run, limit: float, *options: str) -> list[tuple[str, str]] | None:
        """The first test that failed, and why; None if the run did not end in time, or did not run a test."""
        self._report.write_text("")
        workers = ["-n", str(run.processes), "--dist", "worksteal"] if run.processes else []
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-m", "not long", "--engine", run.engine),
            *("-p", "tests.mutants.plugin", "-p", "no:cacheprovider", *left_out(run), *workers, *options, *run.paths),
        ]
        mark = {"HOLDFAST_MUTANT": f"{os.getpid()}-{self.root}", "HOLDFAST_MUTANT_REPORT": str(self._report)}
        environment = {**os.environ, **mark, "PYTHONPATH": f"{self.root / 'src'}{os.pathsep}{self.root}"}
        environment.pop("CI", None)  # no second try: a test that fails is tried again here
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                code: int | None = process.wait(max(1.0, limit))
            except subprocess.TimeoutExpired:
                code = None
            _end_all(mark["HOLDFAST_MUTANT"])
            process.wait()
            failed = [tuple(json.loads(line)) for line in self._report.read_text().splitlines()]
            if code in {0, 1, 2, 5} or failed:
                return failed[:1]
            if code is not None:
                output.seek(0)
                print(f"pytest ended with {code}: {output.read()[-2000:].decode(errors='replace')}", file=sys.stderr)
            return None


def _end_all(mark: str) -> None:
    """End what the tests have left running: servers, wardens, programs. All of them inherit the mark."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOLDFAST_MUTANT") == mark:
                process.kill()
        except psutil.Error:
            pass  # it has ended, or is not ours


def try_mutant(tree: Tree, mutant: Mutant, limit: float, known: tuple[str, str] | None = None) -> Verdict:
    """Look for it in the test that has found it before, if there is one, and then in all that look at it."""
    began = time.monotonic()
    doubtful: list[str] = []
    not_ended = False
    runs = [Run((known[0],), known[1])] if known else []
    for run in [*runs, *runs_for(mutant)]:
        while run.paths:
            left = limit - (time.monotonic() - began)
            if left <= 0:
                return Verdict(seconds=limit, not_ended=True, doubtful=tuple(doubtful))
            with tree.with_mistake(mutant):
                failed = tree.pytest(run, left, *(f"--deselect={test}" for test in doubtful))
            if failed is None:
                not_ended = True
            if not failed:
                break
            test, why = failed[0]
            if _is_due_to(tree, mutant, test, run.engine):
                return Verdict(test, run.engine, why, time.monotonic() - began, doubtful=tuple(doubtful))
            doubtful.append(test)
    return Verdict(seconds=time.monotonic() - began, not_ended=not_ended, doubtful=tuple(doubtful))


def _is_due_to(tree: Tree, mutant: Mutant, test: str, engine: str) -> bool:
    alone = Run((test,), engine)
    with tree.with_mistake(mutant):
        again = tree.pytest(alone, _ONE_TEST)
    return bool(again) and tree.pytest(alone, _ONE_TEST) == []
