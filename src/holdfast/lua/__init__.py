"""The atomic steps: one .lua file each, known by name and by SHA-1.

A file that begins with ``-- include other.lua`` comes after the text of that other, which is no step by itself.
"""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import Final, NamedTuple

__all__ = ["SCRIPTS", "Script"]


class Script(NamedTuple):
    source: bytes
    sha: bytes


def _read() -> dict[str, Script]:
    sources = {file.name: file.read_bytes() for file in files(__name__).iterdir() if file.name.endswith(".lua")}
    included = set()
    scripts = {}
    for name, source in sources.items():
        first = source.split(b"\n", 1)[0].decode()
        whole = source
        if first.startswith("-- include "):
            shared = first.removeprefix("-- include ")
            included.add(shared.removesuffix(".lua"))
            whole = sources[shared] + b"\n" + source
        scripts[name.removesuffix(".lua")] = Script(whole, sha1(whole).hexdigest().encode())
    return {name: script for name, script in scripts.items() if name not in included}


SCRIPTS: Final = _read()
