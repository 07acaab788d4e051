"""A plugin of pytest, for runs of a tree with a mistake in it: writes down what failed."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_NOT_THERE = "not there, or not just once"  # another mistake, planted by its text: tests/lab/mutations.py


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """A test that wants to plant a mistake in the lines that were changed says nothing about what they do."""
    report = yield
    if call.excinfo is not None and _NOT_THERE in str(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, _NOT_THERE)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def _note(report: Any) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message if crash else str(report.longrepr)
        with Path(os.environ["HOLDFAST_MUTANT_REPORT"]).open("a") as file:
            print(json.dumps([report.nodeid, why.strip()[:300]]), file=file)
