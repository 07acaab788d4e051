"""Asking the server for something that may be asked for twice.

Invariant. What is sent here changes nothing, or counts once however often it arrives (by its token). So a step whose
reply did not come is simply sent again, as long as the client's timeout lasts, and once more, because by then a
connection that has been silent throughout was given up for another. If no reply comes at all, whoever asked is told
whether it can have taken effect.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import HoldfastError, Unsupported
from holdfast.lease import Terms
from holdfast.protocol.effects import Effects, Step, StepFailed, call, clock, wait
from holdfast.protocol.mutex import backoff

__all__ = ["insist", "named"]


def insist(step: Step, terms: Terms, *, dice: str = "", shielded: bool = False) -> Effects[Any]:
    """Its reply; or StepFailed, with ``sent`` if any of the tries may have taken effect."""
    until = (yield from clock()) + terms.timeout + terms.resend_after / 2
    sent = False
    attempt = 0
    while True:
        try:
            return (yield from call(step, terms.resend_after, shielded=shielded))
        except StepFailed as failed:
            failed.sent = sent = sent or failed.sent
            now = yield from clock()
            if not failed.retry or now >= until:
                raise
            if attempt or not failed.prompt:
                yield from wait(None, min(now + backoff(dice, attempt), until))
            attempt += 1


def named(error: HoldfastError, what: str) -> HoldfastError:
    """An engine knows of keys; what it is about is known to whoever asks."""
    return Unsupported(f"{what}: {error.what}", error.advice) if isinstance(error, Unsupported) else error
