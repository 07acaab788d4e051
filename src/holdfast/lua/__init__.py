"""The atomic steps: one .lua file each, known by name and by SHA-1.

A line ``-- include other.lua`` stands for the text of that other file, which is no step by itself. It comes no sooner
than it is needed: what a script defines costs time each time it runs.
"""

from __future__ import annotations

import re
from hashlib import sha1
from importlib.resources import files
from typing import Final, NamedTuple

__all__ = ["SCRIPTS", "Script"]


_INCLUDE: Final = re.compile(r"^-- include (\w+\.lua)$", re.MULTILINE)


class Script(NamedTuple):
    source: bytes
    sha: bytes


def _whole(name: str, sources: dict[str, str]) -> str:
    return _INCLUDE.sub(lambda line: _whole(line[1], sources), sources[name])


def _read() -> dict[str, Script]:
    sources = {file.name: file.read_text() for file in files(__name__).iterdir() if file.name.endswith(".lua")}
    included = {name for source in sources.values() for name in _INCLUDE.findall(source)}
    scripts = {}
    for name in sources.keys() - included:
        whole = _whole(name, sources).encode()
        scripts[name.removesuffix(".lua")] = Script(whole, sha1(whole).hexdigest().encode())
    return scripts


SCRIPTS: Final = _read()
