"""How far a protocol has come, for the driver that runs it."""

from __future__ import annotations

import inspect
from typing import Any

from holdfast.protocol.effects import Effects


def is_over(protocol: Effects[Any]) -> bool:
    """Whether it has ended: an exception that the driver sees was then raised by the protocol, not by an effect."""
    return getattr(protocol, "gi_frame", None) is None


def is_begun(protocol: Effects[Any]) -> bool:
    """Whether any of its code has run."""
    return inspect.getgeneratorstate(protocol) != inspect.GEN_CREATED
