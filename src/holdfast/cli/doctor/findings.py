"""What a check of the doctor says, and a server that answers its questions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from holdfast.errors import printable
from holdfast.protocol.effects import Command, StepFailed

OK: Final = "ok"
NOTE: Final = "note"  # good to know; it threatens no lock by itself
WARNING: Final = "warning"  # it can cost locks, or time
DANGER: Final = "danger"  # locks do not work, or cannot be relied on
LEVELS: Final = (DANGER, WARNING, NOTE, OK)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the doctor has found."""

    check: str
    level: str
    message: str
    advice: str = ""
    server: str = ""


class Refused(Exception):
    """The server answered a question with an error."""

    @property
    def is_forbidden(self) -> bool:
        return str(self).startswith("NOPERM")


class Server:
    """One server: asks plain commands of it."""

    def __init__(self, address: str, engine: Any, timeout: float) -> None:
        self.address = address
        self._engine = engine
        self._timeout = timeout

    def ask(self, *words: str | int) -> Any:
        """The reply. Refused if that is an error; StepFailed if there is none."""
        try:
            return self._engine.call(Command(words), self._timeout)
        except StepFailed as failed:
            if failed.__cause__ is not None and type(failed.__cause__).__module__.startswith("hiredis"):
                raise Refused(printable(str(failed.__cause__))) from None
            raise

    def info(self, section: str) -> dict[str, str]:
        """A section of INFO; empty if this user may not ask for it."""
        try:
            text = self.ask("INFO", section).decode(errors="replace")
        except Refused:
            return {}
        pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
        return {name: value for name, _, value in pairs}

    def setting(self, name: str) -> str | None:
        """A setting of the server; None if this user may not ask for it, as with most hosted servers."""
        try:
            reply = self.ask("CONFIG", "GET", name)
        except Refused:
            return None
        values = reply if isinstance(reply, list) else [word for pair in reply.items() for word in pair]
        return values[1].decode(errors="replace") if len(values) > 1 else None

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
