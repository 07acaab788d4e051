"""docs/semaphore.md and docs/rwlock.md do what they say, and their pictures can be drawn."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.servers import Server
from tests.support import run_page

DOCS = Path(__file__).parents[2] / "docs"
SAID = {
    "semaphore": ["slot 0"],
    "rwlock": ["any number of us", "nobody else", "we read what we have written, beside others"],
}


@pytest.mark.parametrize("page", SAID)
def test_the_code_on_the_page_runs(page: str, server: Server) -> None:
    assert run_page(f"{page}.md", server.port) == SAID[page]


@pytest.mark.parametrize("page", SAID)
def test_the_picture_is_one(page: str) -> None:
    assert f"({page}.svg)" in (DOCS / f"{page}.md").read_text()
    root = ET.parse(DOCS / f"{page}.svg").getroot()
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in (DOCS / f"{page}.svg").read_text()
