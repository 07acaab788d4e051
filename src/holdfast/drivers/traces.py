"""Tracebacks without Holdfast's inner frames.

The forty frames of drivers, protocols and engines tell a caller nothing that the message does not. Other errors, which
are bugs in Holdfast, keep their frames.
"""

from __future__ import annotations

from holdfast.errors import HoldfastError
from holdfast.protocol.effects import StepFailed


def cut_short(error: HoldfastError) -> None:
    """Remove Holdfast's frames, up to the first frame of other code, which may be the caller's body.

    Use a bare ``raise`` after it, because that adds no frame.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("holdfast."):
        trace = trace.tb_next
    error.__traceback__ = trace
    # A StepFailed refers to this error, a cycle. What ``from None`` hides may have a password in its frames.
    if isinstance(error.__context__, StepFailed) or error.__suppress_context__:
        error.__context__ = None
