"""What a traceback shows of us: nothing below the method that was called.

The frames of drivers, protocols and engines tell a caller nothing that the message does not, and there are forty of
them. Errors that are not ours, which means mistakes in this code, keep all of theirs.
"""

from __future__ import annotations

from holdfast.errors import HoldfastError
from holdfast.protocol.effects import StepFailed

__all__ = ["cut_short"]


def cut_short(error: HoldfastError) -> None:
    """Take our frames off, down to the first that is not ours: an error of the body that passes keeps where it was.

    The caller lets it go on by a bare ``raise``, which unlike any other adds no frame.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("holdfast."):
        trace = trace.tb_next
    error.__traceback__ = trace
    # A StepFailed knows this very error. What ``from None`` hides may have a URL with its password in its frames.
    if isinstance(error.__context__, StepFailed) or error.__suppress_context__:
        error.__context__ = None
