"""Prints the lowest version that pyproject.toml allows of each dependency and extra, as constraints for pip.

``make test-floors`` installs these: what a floor allows is then tested, and not only what is newest. A floor must be a
version that exists.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[a-z,]+\])?>=([0-9][0-9a-z.]*)")


def floors() -> dict[str, str]:
    """By name of the package: the lowest version."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    named = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    found: dict[str, str] = {}
    for requirement in named:
        if requirement.startswith(f"{project['name']}["):
            continue  # an extra that names others
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise SystemExit(f"{requirement!r} in pyproject.toml has no floor: write name>=version")
        found[match[1]] = match[2]
    return found


if __name__ == "__main__":
    for name, version in floors().items():
        print(f"{name}=={version}")
