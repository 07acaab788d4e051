"""docs/multi.md does what it says."""

from __future__ import annotations

import pytest

from tests.servers import Server
from tests.support import run_page

SAID = {
    "multi.md": ["account:7, account:3 ['account:3', 'account:7']"],
}


@pytest.mark.parametrize("page", SAID)
def test_the_code_on_the_page_runs(page: str, server: Server) -> None:
    assert run_page(page, server.port) == SAID[page]
