"""The bridge to Lua. It runs the scripts of the project as a server does.

One Lua 5.1 interpreter serves all stores of the process. A script keeps no state between two runs, so it is
compiled once, even if many stores load it. ``sandbox.lua`` defines what a script can see and change; this module
converts values between Python and Lua.
"""

from __future__ import annotations

import hashlib
import threading
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lupa.lua51 import LuaRuntime

from holdfast.lab.servers.commands.arguments import LARGEST, SMALLEST
from holdfast.lab.servers.commands.table import find
from holdfast.lab.servers.replies import OOM, Reply, ReplyError, Status, format_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.lab.servers.store import Store


NOT_LOCAL: Final = "Script attempted to access a non local key in a cluster node"
_WITHOUT_KEYS: Final = frozenset({b"TIME", b"PUBLISH", b"PUBSUB"})


class Script(NamedTuple):
    digest: bytes
    chunk: Any  # A Lua function.


class _Current:
    """What the running script works on. Scripts cannot call scripts, so there is never more than one."""

    store: Store
    wrote = False
    keys = 0  # the number of its KEYS


_scripts: dict[bytes, Script] = {}
_current = _Current()
_lock = threading.RLock()  # Stores of several threads share the interpreter and ``_current``.


def compile_script(source: bytes) -> Script:
    digest = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
    if digest not in _scripts:
        with _lock:
            tag, chunk = _compile(source)
        if tag != b":":
            raise ReplyError(_text(chunk))
        _scripts[digest] = Script(digest, chunk)
    return _scripts[digest]


def compiled(digest: bytes) -> Script:
    """A script that was compiled before."""
    return _scripts[digest]


def run(store: Store, script: Script, key_count: int, words: tuple[bytes, ...]) -> Reply:
    with _lock:
        _current.store, _current.wrote, _current.keys = store, False, key_count
        return _from_lua(*_run(script.chunk, key_count, *words))


def _dispatch(*words: object) -> tuple[Any, ...]:
    """Implements ``redis.call`` and ``redis.pcall``."""
    try:
        return _to_lua(_call([word if type(word) is bytes else _word(word) for word in words]))
    except ReplyError as error:
        return b"-", error.message.encode()


def _sha1hex(text: object) -> bytes:
    """Implements ``redis.sha1hex``."""
    data = text if type(text) is bytes else _word(text)
    return hashlib.sha1(data, usedforsecurity=False).hexdigest().encode()


def _call(words: list[bytes]) -> Reply:
    if not words:
        raise ReplyError("ERR Please specify at least one argument for this call")
    command = find(words)
    if command is None:
        raise ReplyError("ERR Unknown command called from script")
    if not command.takes(len(words)):
        raise ReplyError("ERR Wrong number of args calling command from script")
    if command.noscript:
        raise ReplyError("ERR This Valkey command is not allowed from script")
    if _current.store.slot == "moving" and _is_away(words):
        raise ReplyError(f"ERR {NOT_LOCAL}")
    if command.write:
        # After its first write, even by DEL, a script is not stopped for lack of memory: half of its writes would be
        # worse than all of them.
        if _current.store.oom and not _current.wrote and command.deny_oom:
            raise ReplyError(OOM)
        _current.wrote = True
    return command.run(_current.store, *words[command.skip :])


def _is_away(words: list[bytes]) -> bool:
    """Whether a node that moves its slot away refuses this command, because a key does not exist.

    The node also refuses a key that the script itself has just deleted. A script with a single key that does not exist
    runs on the other node, where it may create the key.
    """
    return words[0].upper() not in _WITHOUT_KEYS and _current.keys > 1 and words[1] not in _current.store.values


def _word(value: object) -> bytes:
    if type(value) in (int, float):
        return format_number(value)  # type: ignore[arg-type]
    raise ReplyError("ERR Command arguments must be strings or integers")


def _to_lua(reply: Reply) -> tuple[Any, ...]:
    if isinstance(reply, list):
        return b"*", len(reply), *map(_element, reply)
    if isinstance(reply, Status):
        return b"+", reply.encode()
    return b":", False if reply is None else reply


def _element(reply: Reply) -> Any:
    if isinstance(reply, list):
        return _pack(*map(_element, reply))
    return False if reply is None else reply


def _from_lua(tag: bytes, *values: Any) -> Reply:
    if tag == b":":
        return _scalar(values[0])
    if tag == b"*":
        return [_from_lua(*_export(value)) if _is_table(value) else _scalar(value) for value in values[1:]]
    if tag == b"!":
        raise values[0]
    # A status or an error is one line, and the server ends the text at the first NUL byte, as C does.
    text = _text(values[0]).partition("\0")[0].replace("\r", " ").replace("\n", " ")
    return Status(text) if tag == b"+" else ReplyError(text)


def _scalar(value: Any) -> Reply:
    """A value as a reply: numbers lose their fraction, true is 1; false and values without a counterpart are nil."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, int):
        return None if value is False else int(value) if SMALLEST <= value <= LARGEST else SMALLEST
    if isinstance(value, float):
        # If a float does not fit, C converts it to the smallest integer (on common machines).
        return int(value) if SMALLEST <= value < LARGEST else SMALLEST
    return None


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


# Without an encoding, Lua strings become Python bytes, and nothing is decoded.
_runtime = LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False, register_builtins=False)
_Table = type(_runtime.table())
_compile: Callable[..., tuple[bytes, Any]]
_run: Callable[..., tuple[Any, ...]]
_compile, _run, _export, _pack = _runtime.execute(
    resources.files("holdfast.lab.servers").joinpath("sandbox.lua").read_bytes(), _dispatch, _sha1hex
)


def _is_table(value: Any) -> bool:
    return isinstance(value, _Table)
