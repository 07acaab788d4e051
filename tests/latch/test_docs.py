"""docs/latch.md does what it says."""

from __future__ import annotations

from tests.servers import Server
from tests.support import run_page


def test_the_code_on_the_page_runs(server: Server) -> None:
    *lines, refused = run_page("latch.md", server.port)
    assert lines == ["2 left", "not yet", "True"]
    assert "count=4" in refused
    assert "began with count=3" in refused
