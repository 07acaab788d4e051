"""What a check of the doctor says, and a server that answers its questions."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Final

from holdfast.errors import Unavailable
from holdfast.protocol.effects import Command, StepFailed
from holdfast.untrusted import printable

OK: Final = "ok"
NOTE: Final = "note"  # good to know; it threatens no lock by itself
UNCHECKED: Final = "unchecked"  # the check could not be made, so nothing is known
WARNING: Final = "warning"  # it can cost locks, or time
DANGER: Final = "danger"  # locks do not work, or cannot be relied on
LEVELS: Final = (DANGER, WARNING, UNCHECKED, NOTE, OK)

_WITH_SUBCOMMANDS: Final = ("acl", "client", "cluster", "config", "pubsub")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the doctor has found."""

    check: str
    level: str
    message: str
    advice: str = ""
    server: str = ""


class Refused(Exception):
    """The server answered a command with an error."""

    def __init__(self, text: str, *words: str | int) -> None:
        super().__init__(printable(text))
        named = re.search(r"run the '([\w|-]+)'", text)
        self.command = _name_of(words) or (named[1] if named else "")

    @property
    def is_forbidden(self) -> bool:
        return str(self).startswith("NOPERM")

    @property
    def is_about_keys(self) -> bool:
        """Whether the user may call the command, but not with this key."""
        return self.is_forbidden and re.search(r"access .*key", str(self)) is not None


def refused_by(failed: BaseException, *words: str | int) -> Refused | None:
    """The error reply that made a step of this command fail; None if there was no reply."""
    cause = failed.__cause__
    is_reply = cause is not None and type(cause).__module__.startswith("hiredis")
    return Refused(str(cause), *words) if is_reply and type(cause).__name__ == "ReplyError" else None


def why(failed: StepFailed) -> str:
    """Why a step failed, in the same words for each server."""
    return (
        "; ".join(dict.fromkeys(failed.error.causes.values())) if isinstance(failed.error, Unavailable) else str(failed)
    )


def own_key(prefix: str) -> str:
    """A new key for the doctor to try what locks do, under the same prefix as theirs."""
    return f"{prefix}holdfast:doctor:{token_hex(8)}"


def acl_line(user: str, rules: Iterable[str]) -> str:
    return f"ACL SETUSER {user} {' '.join(rules)}"


class Server:
    """One server: asks plain commands of it.

    ``user`` is the name in the URL; ``prefix`` is the start of all names of locks. ``is_watched``: Sentinels let a
    replica take over if it fails.
    """

    def __init__(
        self, address: str, engine: Any, timeout: float, *, user: str, prefix: str, is_watched: bool = False
    ) -> None:
        self.address = address
        self.prefix = prefix
        self.is_watched = is_watched
        self._engine = engine
        self._timeout = timeout
        self._user = user
        self._asked_for_user = False

    def ask(self, *words: str | int) -> Any:
        """The reply. Refused if that is an error; StepFailed if there is none."""
        try:
            return self._engine.call(Command(words), self._timeout)
        except StepFailed as failed:
            refused = refused_by(failed, *words)
            if refused is not None:
                raise refused from None
            raise

    def may(self, *words: str | int) -> bool:
        """Whether this user may call the command, and the server knows it."""
        try:
            self.ask(*words)
        except Refused as refused:
            return not refused.is_forbidden and "unknown" not in str(refused)
        return True

    @property
    def user(self) -> str:
        """The user's name, for advice. A user that may not ask for it has the name that is in the URL."""
        if not self._asked_for_user:
            self._asked_for_user = True
            try:
                self._user = self.ask("ACL", "WHOAMI").decode(errors="replace")
            except Refused:
                pass
        return self._user

    def info(self, section: str) -> dict[str, str]:
        """A section of INFO."""
        text = self.ask("INFO", section).decode(errors="replace")
        pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
        return {name: value for name, _, value in pairs}

    def setting(self, name: str) -> str:
        """A setting of the server; empty if the server does not know it."""
        reply = self.ask("CONFIG", "GET", name)
        values = reply if isinstance(reply, list) else [word for pair in reply.items() for word in pair]
        return values[1].decode(errors="replace") if len(values) > 1 else ""

    def round_trip(self) -> tuple[float, float]:
        """Seconds of the fastest of some requests; and how far its clock is ahead of ours, in seconds."""
        best, ahead = float("inf"), 0.0
        for _ in range(5):
            began = time.time()
            seconds, micros = self.ask("TIME")
            took = time.time() - began
            if took < best:
                best, ahead = took, int(seconds) + int(micros) / 1e6 - (began + took / 2)
        return best, ahead

    def serves(self, key: str) -> bool:
        """Whether this server has the slot of this key. A server that is no node of a cluster has all slots."""
        try:
            self.ask("EVAL", "return 1", 1, key)
        except Refused as refused:
            return not str(refused).startswith(("MOVED", "ASK"))
        return True

    def unchecked(self, check: str, refused: Refused) -> Finding:
        """The finding that a check could not be made, with the line that allows it."""
        if refused.is_about_keys:
            message, advice = self.no_keys()
        elif refused.is_forbidden:
            message = f"user {self.user!r} may not use {refused.command.replace('|', ' ').upper()}"
            advice = acl_line(self.user, [f"+{refused.command}"])
        else:
            message, advice = f"it answered {refused}", "run holdfast doctor again when it answers that"
        return Finding(check, UNCHECKED, f"not checked: {message}", advice)

    def no_keys(self) -> tuple[str, str]:
        """That this user may not use some keys, and what to do about it."""
        line = acl_line(self.user, [f"~{self.prefix}*"])
        return (
            f"user {self.user!r} may not use all keys that start with {self.prefix!r}",
            f"give the prefix of your lock names with --prefix, or add: {line}",
        )


def _name_of(words: tuple[str | int, ...]) -> str:
    """The command as ACL rules name it: ``config|get``."""
    names = [str(word).lower() for word in words[:2]]
    return "|".join(names if names and names[0] in _WITH_SUBCOMMANDS else names[:1])
