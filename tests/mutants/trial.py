"""One mistake on trial: planted in a copy of the tree, and looked for by the tests.

A test finds it if it fails with the mistake, fails again alone, and passes alone without it. So neither a test that
fails now and then nor a busy machine can find a mistake. A mistake that makes a program hang is found if the time limit
of a test says so; a run that does not end in time has found nothing.
"""

from __future__ import annotations

import ctypes
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
from typing import Final, NamedTuple

import psutil

from tests.mutants.kept import Kept
from tests.mutants.selection import Run, left_out, runs_for
from tests.mutants.sites import ROOT, Mutant, planted

__all__ = ["Verdict", "begin", "try_mutant"]

_NOT_COPIED: Final = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis")
_PR_SET_CHILD_SUBREAPER: Final = 36
_ONE_TEST: Final = 130.0  # the limit of a test in pyproject.toml, and the start of pytest


class Verdict(NamedTuple):
    found_by: str = ""  # the test
    engine: str = ""
    why: str = ""
    seconds: float = 0.0
    not_ended: bool = False
    doubtful: tuple[str, ...] = ()  # tests that failed, but not for the mistake alone


class Tree:
    """A copy of the working tree, in which one process plants mistakes one after the other."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / str(os.getpid())
        shutil.copytree(ROOT, self.root, ignore=_NOT_COPIED, symlinks=True)
        self._report = folder / f"{os.getpid()}.failed"
        self._changes = 0
        if sys.platform == "linux":  # servers that tests leave running become children of this process
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

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
        environment = {**os.environ, "HOLDFAST_MUTANT_REPORT": str(self._report)}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.root / "src"), str(self.root)])
        environment.pop("CI", None)  # no second try: a test that fails is tried again here
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                code: int | None = process.wait(max(1.0, limit))
            except subprocess.TimeoutExpired:
                code = None
            _end_children()
            process.wait()
            failed = [tuple(json.loads(line)) for line in self._report.read_text().splitlines()]
            if code in {0, 1, 2, 5} or failed:
                return failed[:1]
            if code is not None:
                output.seek(0)
                print(f"pytest ended with {code}: {output.read()[-2000:].decode(errors='replace')}", file=sys.stderr)
            return None


def _end_children() -> None:
    """End what the tests have left running: servers, wardens, programs."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                pass  # it has ended
        psutil.wait_procs(left, 5.0)


_tree: Tree


def begin(folder: Path) -> None:
    """What each process that tries mistakes does first."""
    global _tree  # noqa: PLW0603 (one per process)
    _tree = Tree(folder)


def try_mutant(kept: Kept, limit: float) -> Verdict:
    """Look for it in the test that has found it before, if there is one, and then in all that look at it."""
    tree, mutant = _tree, kept.mutant
    began = time.monotonic()
    doubtful: list[str] = []
    not_ended = False
    runs = [Run((kept.found_by,), kept.engine)] if kept.found_by else []
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
