"""Scripts: which of them a server knows, and the commands that run one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.servers import lua
from holdfast.lab.servers.commands.arguments import integer
from holdfast.lab.servers.commands.table import command
from holdfast.lab.servers.replies import OK, Reply, ReplyError

if TYPE_CHECKING:
    from holdfast.lab.servers.store import Store


@command(noscript=True)
def eval_(store: Store, source: bytes, key_count: bytes, *words: bytes) -> Reply:
    count = _count_keys(key_count, words)
    return _run(store, lua.compile_script(source), count, words)


@command(noscript=True)
def evalsha(store: Store, digest: bytes, key_count: bytes, *words: bytes) -> Reply:
    count = _count_keys(key_count, words)
    known = digest.lower()
    if known not in store.scripts:
        raise ReplyError("NOSCRIPT No matching script.")
    return _run(store, lua.compiled(known), count, words)


def _count_keys(key_count: bytes, words: tuple[bytes, ...]) -> int:
    count = integer(key_count)
    if count > len(words):
        raise ReplyError("ERR Number of keys can't be greater than number of args")
    if count < 0:
        raise ReplyError("ERR Number of keys can't be negative")
    return count


def _run(store: Store, script: lua.Script, key_count: int, words: tuple[bytes, ...]) -> Reply:
    if store.slot and key_count > 1 and (store.slot == "divided" or not store.values.keys() >= {*words[:key_count]}):
        # Its keys may be on two nodes: a key that does not exist here may exist on the other node.
        raise ReplyError("TRYAGAIN Multiple keys request during rehashing of slot")
    if script.digest not in store.scripts:
        store.scripts |= {script.digest}
    return lua.run(store, script, key_count, words)


@command(of="script", noscript=True)
def load(store: Store, source: bytes) -> Reply:
    digest = lua.compile_script(source).digest
    store.scripts |= {digest}
    return digest


@command(of="script", noscript=True)
def exists(store: Store, digest: bytes, *digests: bytes) -> Reply:
    return [int(each.lower() in store.scripts) for each in (digest, *digests)]


@command(of="script", noscript=True)
def flush(store: Store, mode: bytes = b"SYNC") -> Reply:
    if mode.upper() not in {b"SYNC", b"ASYNC"}:
        raise ReplyError("ERR SCRIPT FLUSH only support SYNC|ASYNC option")
    store.scripts = frozenset()
    return OK
