from __future__ import annotations

from tests.conformance.conftest import play
from tests.protocol.conftest import _worlds_end

__all__ = ["_worlds_end", "play"]
