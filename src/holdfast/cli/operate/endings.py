"""What to type instead, if there is nothing under a name: programs with a namespace put it in front of their names."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Final

from holdfast.blocking import Client
from holdfast.cli.operate.common import Output
from holdfast.cli.operate.tables import named
from holdfast.cli.place import note_on
from holdfast.holder import LockInfo
from holdfast.protocol.inspection.endings import Endings, find_endings

_SHOWN: Final = 3


def whole_key(client: Client, name: str) -> str:
    """The name with the namespace of the client."""
    return client._namespace + name


def suggest_in_use(client: Client, output: Output, name: str, command: str, *, held: bool = False) -> None:
    """Name the locks that are in use, or held, whose keys end in that name; and the command for each."""

    def choose(found: Endings) -> dict[str, str]:
        return {info.key: _use(info) for info in found.in_use if info.holders or not held}

    pattern = "" if client._namespace else f"holdfast ls {shlex.quote(f'*{name}')}"  # else it lists the namespace only
    _suggest(client, output, name, command, choose, listing=pattern)


def suggest_broken(client: Client, output: Output, name: str, command: str) -> None:
    """The same for locks that have a history."""
    _suggest(client, output, name, command, lambda found: dict.fromkeys(found.broken, "was broken"))


def _use(info: LockInfo) -> str:
    if not info.holders:
        return "is waited for"
    more = f" and {info.holder_count - 1} more" if info.holder_count > 1 else ""
    return f"is held by {named(info.holders[0])}{more}"


def _suggest(
    client: Client,
    output: Output,
    name: str,
    command: str,
    choose: Callable[[Endings], dict[str, str]],
    *,
    listing: str = "",
) -> None:
    found = client._driver.run(find_endings(name))
    facts = choose(found)
    facts.pop(whole_key(client, name), None)  # it was asked for
    for key, fact in list(facts.items())[:_SHOWN]:
        output.say(f"but {key!r} {fact}: {_how(key, client._namespace, command)}")
    if len(facts) > _SHOWN:
        output.say(f"and {len(facts) - _SHOWN} more" + (f": {listing}" if listing else ""))
    if not found.complete and found.allowed:
        rest = f": {listing} looks through all" if listing else ""
        output.say(f"the search for keys that end in {name!r} stopped after {found.scanned:,} keys{rest}")
    if note := note_on(client):
        output.say(note)


def _how(key: str, namespace: str, command: str) -> str:
    """The command for this key, where the client puts its namespace in front of each name."""
    if not key.startswith(namespace):
        return f"to reach it, leave namespace={namespace!r} out of the URL"
    name = key.removeprefix(namespace)
    if name.startswith("-"):
        return f"put -- before it, behind all options: {command.format('...')}"
    return command.format(shlex.quote(name))
