"""Runs a protocol effect by effect on a real server, so that a test can let others act at any point of it."""

from __future__ import annotations

import time
from typing import Any, Self

import holdfast
from holdfast.drivers import clock
from holdfast.protocol import effects as fx

__all__ = ["ByHand"]

_UNDER_WAY = object()


class ByHand:
    """An acquire or a release that goes no further than it is told to."""

    def __init__(self, client: holdfast.Client, protocol: Any, *, behind: float = 0.0) -> None:
        """``behind``: for how many seconds it has been paused since it read the time of day."""
        self._behind = behind
        self._driver = client._driver
        self._protocol = protocol
        self._result: Any = _UNDER_WAY
        self._effect: Any = None
        self._advance(protocol.send, None)

    def until(self, word: str) -> Self:
        """Go on until that command is about to be sent."""
        while self._result is _UNDER_WAY and word not in self._words():
            self._perform()
        assert self._result is _UNDER_WAY, f"it ended without {word}"
        return self

    def finish(self) -> Any:
        while self._result is _UNDER_WAY:
            self._perform()
        return self._result

    def _words(self) -> list[object]:
        effect = self._effect
        if isinstance(effect, fx.Call):
            return [effect.step.args[0] if isinstance(effect.step, fx.Command) else effect.step.script]
        return [command.args[0] for command in effect.commands] if isinstance(effect, fx.CallOn) else []

    def _perform(self) -> None:
        effect = self._effect
        try:
            if isinstance(effect, fx.Now):
                value: Any = time.time() - self._behind if effect.wall else clock.now()
            elif isinstance(effect, fx.Call):
                value = self._driver.engine.call(effect.step, effect.timeout)
            elif isinstance(effect, fx.NewToken):
                value = clock.new_token(effect.label)
            elif isinstance(effect, fx.Caller):
                value = self._driver.caller()
            elif isinstance(effect, fx.Wait):
                time.sleep(max(0.0, effect.until - clock.now()))
                value = clock.now()
            else:
                value = self._driver._perform(effect, None)
        except Exception as error:
            self._advance(self._protocol.throw, error)
        else:
            self._advance(self._protocol.send, value)

    def _advance(self, advance: Any, value: Any) -> None:
        try:
            self._effect = advance(value)
        except StopIteration as done:
            self._result = done.value
