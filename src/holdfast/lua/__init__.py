"""The atomic steps: one .lua file each, known by name and by SHA-1.

The step ``pool/acquire.lua`` is named ``pool_acquire``; a step in ``lock/`` has no prefix: ``acquire``. A line
``-- include fence.lua`` is replaced by the text of ``include/fence.lua``. Such a line comes as late as possible in a
step, because each definition of a script costs time whenever the script runs.

A node of a cluster notifies by sharded channels, which belong to a slot as keys do. So its scripts differ in the two
commands of pub/sub only.
"""

from __future__ import annotations

import re
from hashlib import sha1
from importlib.resources import files
from typing import Final, NamedTuple

_INCLUDE: Final = re.compile(r"^-- include (\w+\.lua)$", re.MULTILINE)


class Script(NamedTuple):
    source: bytes
    sha: bytes


def _load() -> dict[str, Script]:
    texts = {  # each file is read once, because this is part of every start of a program
        folder.name: {file.name: file.read_text() for file in folder.iterdir()}
        for folder in files(__name__).iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
    }
    include = texts.pop("include")

    def expand(text: str) -> str:
        return _INCLUDE.sub(lambda line: expand(include[line[1]]), text)

    scripts = {}
    for folder, files_there in texts.items():
        prefix = "" if folder == "lock" else f"{folder}_"
        for file, text in files_there.items():
            source = expand(text).encode()
            scripts[prefix + file.removesuffix(".lua")] = Script(source, sha1(source).hexdigest().encode())
    return scripts


def _sharded(script: Script) -> Script:
    source = script.source.replace(b"'PUBLISH'", b"'SPUBLISH'").replace(b"'NUMSUB'", b"'SHARDNUMSUB'")
    return Script(source, sha1(source).hexdigest().encode())


SCRIPTS: Final = _load()
SHARDED: Final = {name: _sharded(script) for name, script in SCRIPTS.items()}  # for the nodes of a cluster
