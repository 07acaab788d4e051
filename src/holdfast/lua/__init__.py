"""The atomic steps: one .lua file each, known by name and by SHA-1."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import Final, NamedTuple

__all__ = ["SCRIPTS", "Script"]


class Script(NamedTuple):
    source: bytes
    sha: bytes


def _read() -> dict[str, Script]:
    scripts = {}
    for file in files(__name__).iterdir():
        if file.name.endswith(".lua"):
            source = file.read_bytes()
            scripts[file.name.removesuffix(".lua")] = Script(source, sha1(source).hexdigest().encode())
    return scripts


SCRIPTS: Final = _read()
