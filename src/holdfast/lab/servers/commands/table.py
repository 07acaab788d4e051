"""The table of commands: one function per command. Its arity comes from the signature of the function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.lab.servers.replies import Reply, ReplyError

Run = TypeVar("Run", bound=Callable[..., Reply])


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    run: Callable[..., Reply]  # (store, *arguments)
    skip: int  # The number of words in the name: one, or two as in SCRIPT LOAD.
    least: int  # The fewest arguments, the name included.
    most: float
    write: bool  # May change data: a script that has called it is no longer stopped for lack of memory.
    deny_oom: bool  # May need memory, so it is refused when there is none.
    noscript: bool  # Scripts may not call it.

    def takes(self, count: int) -> bool:
        return self.least <= count <= self.most


COMMANDS: dict[bytes, Command] = {}
_FAMILIES: set[bytes] = set()


def command(
    *, of: str = "", write: bool = False, deny_oom: bool = False, noscript: bool = False
) -> Callable[[Run], Run]:
    """Add a function to the table under its own name, without the underscore that avoids the name of a builtin.

    ``of`` is the first word of a name of two words, such as SCRIPT LOAD.
    """

    def enter(function: Run) -> Run:
        name = function.__name__.strip("_")
        least, most = 0, 0.0  # The first parameter is the store; it is counted in place of the name.
        for parameter in inspect.signature(function).parameters.values():
            most += float("inf") if parameter.kind is parameter.VAR_POSITIONAL else 1
            least += parameter.kind is not parameter.VAR_POSITIONAL and parameter.default is parameter.empty
        if of:
            _FAMILIES.add(of.encode())
            name, least, most = f"{of}|{name}", least + 1, most + 1
        COMMANDS[name.encode()] = Command(
            name, function, 2 if of else 1, least, most, write or deny_oom, deny_oom, noscript
        )
        return function

    return enter


def find(words: Sequence[bytes]) -> Command | None:
    """The command of that name, without a check of its arguments; None if there is none."""
    name = words[0].lower()
    if name in _FAMILIES and len(words) > 1:
        found = COMMANDS.get(name + b"|" + words[1].lower())
        if found is None:
            family, member = (word.decode(errors="replace") for word in words[:2])
            raise ReplyError(f"ERR unknown subcommand '{member}'. Try {family.upper()} HELP.")
        return found
    return COMMANDS.get(name)


def look_up(words: Sequence[bytes]) -> Command:
    """The command that a client calls, or the server's error if there is none or the arity is wrong."""
    found = find(words)
    if found is None:
        name = words[0].decode(errors="replace")
        if words[0].lower() in _FAMILIES:
            raise wrong_arity(name.lower())
        shown = "".join(f"'{word.decode(errors='replace')}' " for word in words[1:])
        raise ReplyError(f"ERR unknown command '{name}', with args beginning with: {shown}")
    if not found.takes(len(words)):
        raise wrong_arity(found.name)
    return found


def wrong_arity(name: str) -> ReplyError:
    return ReplyError(f"ERR wrong number of arguments for '{name}' command")
