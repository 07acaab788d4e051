"""The page and its drawings: well-formed, escaped, self-contained; in a real browser, on a phone and in the dark."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast.lab.report.page import write_page
from holdfast.lab.report.picture import Picture
from holdfast.lab.report.trace import Trace
from tests.browser import CHROMIUM, Browser
from tests.lab.stories import FINDINGS, HOSTILE, MEANING, ORPHAN, PAUSE, STORIES

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "input", "wbr", "br"}
PAGE = write_page(FINDINGS, MEANING, {"seed": "7", "faults": "<all>"})


class Reader(HTMLParser):
    """Whether tags are closed in order, which ids there are, and what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


@pytest.fixture(scope="module")
def read() -> Reader:
    reader = Reader()
    reader.feed(PAGE)
    assert not reader.stack
    return reader


# Drawings -----------------------------------------------------------------------------------------------------------


def parts(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [part for part in root.iter() if name in part.get("class", "").split()]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.recipe)
def test_a_drawing_is_well_formed_and_has_every_moment(story: Trace) -> None:
    for source in (Picture(story).inline("t"), Picture(story, words=True).standalone("<t>", "&s")):
        root = ElementTree.fromstring(source)
        assert root.tag == f"{SVG}svg"
        numbers = {part.get("data-number") for part in parts(root, "moment")}
        assert numbers == {str(number) for number in range(1, len(story.moments) + 1)}
        assert len(parts(root, "alarm")) == 1
        assert root.get("role") == "img"


def test_holds_are_bars_from_the_grant_to_their_end() -> None:
    root = ElementTree.fromstring(Picture(PAUSE).inline("t"))
    bars = {
        int(moment.get("data-number", "0")): len(parts(moment, "held"))
        for moment in parts(root, "moment")
        if parts(moment, "held")
    }
    assert bars == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2}
    assert len([bar for bar in parts(root, "held") if "halted" in bar.get("class", "")]) == 3
    assert len(parts(root, "clash")) == 2


def test_who_has_crashed_has_no_lane_any_more() -> None:
    root = ElementTree.fromstring(Picture(ORPHAN).inline("t"))
    lanes = [
        sum(line.get("class") in ("idle", "halted") for line in moment.iter(f"{SVG}line"))
        for moment in parts(root, "moment")
        if moment.find(f"{SVG}title") is not None
    ]
    assert lanes == [1, 1, 1, 1], "A holds, and then is gone; B is there all the time"
    assert [text.text for text in parts(root, "fault")] == ["crash"]


def test_the_words_are_in_the_file_and_the_style_with_them() -> None:
    source = Picture(PAUSE, words=True).standalone("set_nx: MutualExclusion", "broken")
    root = ElementTree.fromstring(source)
    said = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
    assert "A and B hold the lock at the same time." in said
    assert "SET foo a.1 NX PX 3000 → OK" in said
    assert "prefers-color-scheme: dark" in source
    assert "http" not in source.replace("http://www.w3.org/2000/svg", "")


def test_words_stay_within_the_wide_drawing() -> None:
    root = ElementTree.fromstring(Picture(HOSTILE, words=True).standalone("t", "s"))
    assert all(len(text.text or "") <= 74 for text in root.iter(f"{SVG}text"))


# The page -----------------------------------------------------------------------------------------------------------


def test_everything_is_escaped(read: Reader) -> None:
    assert "</script><b>" not in PAGE
    assert "<u>C" not in PAGE
    assert "&lt;u&gt;C&lt;/u&gt; &amp; A" in PAGE
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert not {"i", "u"} & {tag for tag, _ in read.tags}


def test_the_page_needs_nothing_but_itself(read: Reader) -> None:
    for tag, attributes in read.tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "srcset", "style", "onclick"} & set(attributes), tag
        assert (attributes.get("href", "#") or "").startswith("#")
    assert not re.search(r"url\(|@import|fetch\(", PAGE)


def test_every_broken_cell_leads_to_its_drawing(read: Reader) -> None:
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    links = [attributes["href"] or "" for tag, attributes in read.tags if tag == "a"]
    assert len(ids) == len(set(ids))
    assert sorted(links) == sorted(f"#{name}" for name in ids)
    assert len(links) == len(STORIES)


def test_every_cell_says_its_verdict_in_a_word(read: Reader) -> None:
    classes = [attributes.get("class") or "" for _, attributes in read.tags]
    assert [classes.count(f"cell {verdict}") for verdict in ("broken", "holds", "unknown")] == [3, 25, 2]
    for said in ("✗ broken <small>3 steps</small>", "✓ holds <small>1.2k states</small>", "? unknown "):
        assert said in PAGE


def test_the_page_says_how_it_came_about() -> None:
    assert "seed <b>7</b>" in PAGE
    assert "faults <b>&lt;all&gt;</b>" in PAGE
    assert "states <b>3,702</b>" in PAGE


# In a browser -------------------------------------------------------------------------------------------------------

NOW = "[...document.querySelectorAll('details[open] svg .now')].map((part) => part.dataset.number).join()"
STANDING = f"{NOW} + '|' + document.querySelector('details[open] .output').textContent"
OPACITY = "getComputedStyle(document.querySelectorAll('details[open] svg .moment:has(title)')[{}]).opacity"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        assert "HOLDFAST_NEEDS_BROWSER" not in os.environ, "there should be a chromium here"
        pytest.skip("no chromium on this machine")
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(PAGE, encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("width", [360, 390, 700, 900, 1121, 1200])
def test_nothing_scrolls_sideways(browser: Browser, address: str, width: int) -> None:
    for script in (True, False):
        browser.open(address, width=width, height=844, script=script)
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
        browser.look("document.querySelectorAll('details').forEach((pitfall) => { pitfall.open = true })")
        assert browser.look("document.documentElement.clientWidth") == width
        assert browser.look("document.documentElement.scrollWidth") <= width
        inner = (
            "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1)"
        )
        outside = browser.look(f"{inner}.filter((e) => !e.closest('thead')).map((e) => e.outerHTML.slice(0, 80))")
        assert outside == []


def test_the_slider_the_buttons_and_the_keys_move_the_moment(browser: Browser, address: str) -> None:
    browser.open(f"{address}#set_nx-MutualExclusion")
    assert browser.look(STANDING) == "6,6|6 of 6", "it begins with everything visible"
    browser.look("document.querySelector('details[open] .back').click()")
    assert browser.look(STANDING) == "5,5|5 of 6"
    browser.look("document.querySelector('details[open] .slider').focus()")
    browser.press("ArrowLeft")
    assert browser.look(STANDING) == "4,4|4 of 6"
    browser.look("document.querySelector('details[open] .on').focus()")
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    browser.press("ArrowRight")
    assert browser.look(STANDING) == "3,3|3 of 6"
    assert "A is paused" in browser.look("document.querySelector('details[open] .now-words').textContent")
    assert (
        float(
            browser.look(
                f"(async () => {{ await Promise.all(document.getAnimations().map((a) => a.finished)); "
                f"return {OPACITY.format(3)} }})()"
            )
        )
        < 0.5
    )
    assert float(browser.look(OPACITY.format(2))) == 1.0
    browser.look("document.querySelectorAll('details[open] .story > li')[0].click()")
    assert browser.look(STANDING) == "1,1|1 of 6"
    assert browser.look("document.querySelector('details[open] .back').disabled") is True
    assert browser.complaints == []


@pytest.mark.parametrize(("width", "height"), [(390, 560), (1200, 300)])
def test_the_chosen_moment_and_the_controls_stay_in_sight(
    browser: Browser, address: str, width: int, height: int
) -> None:
    browser.open(f"{address}#set_nx-MutualExclusion", width=width, height=height)
    for number in (1, 2, 3, 4, 5, 6, 1):  # the first click starts again from the beginning
        browser.look("document.querySelector('details[open] .on').click()")
        assert browser.look(STANDING) == f"{number},{number}|{number} of 6"
        row, panel, controls = (
            browser.look(
                f"(() => {{ const box = document.querySelector('details[open] {part}').getBoundingClientRect();"
                "return [box.top, box.bottom] })()"
            )
            for part in ("svg .now", ".steps", ".controls")
        )
        assert row[0] >= 0
        assert row[1] <= (panel[0] if width < 600 else height)
        assert controls[0] >= 0
        assert controls[1] <= height


def test_that_time_passes_is_a_moment_but_no_step(browser: Browser, address: str) -> None:
    browser.open(f"{address}#setnx-NoOrphan")
    assert browser.look(STANDING) == "4,4|–"
    browser.look("document.querySelector('details[open] .back').click()")
    assert browser.look(STANDING) == "3,3|3 of 3"


def test_a_link_of_the_matrix_opens_its_drawing(browser: Browser, address: str) -> None:
    browser.open(address, width=390, height=844)
    assert browser.look("document.querySelectorAll('details[open]').length") == 0
    browser.look("document.querySelector('a.cell').click()")
    browser.look("new Promise((done) => setTimeout(done, 0))")
    assert browser.look("document.querySelector('details[open]').id") == "setnx-NoOrphan"
    assert abs(browser.look("document.querySelector('details[open]').getBoundingClientRect().top")) < 40


def test_dark_mode_has_colours_of_its_own(browser: Browser, address: str) -> None:
    colours = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
        "getComputedStyle(document.querySelector('svg .alarm')).fill,"
        "getComputedStyle(document.querySelector('.pitfall')).backgroundColor]"
    )
    browser.open(address)
    light = browser.look(colours)
    browser.open(address, dark=True)
    dark = browser.look(colours)
    assert all(one != other for one, other in zip(light, dark, strict=True))


def test_without_a_script_all_drawings_are_there(browser: Browser, address: str) -> None:
    browser.open(address, script=False)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.look("document.querySelectorAll('details[open] svg').length") == len(STORIES)
    assert browser.look("[...document.querySelectorAll('.steps')].every((e) => e.offsetHeight === 0)")
    assert browser.look("[...document.querySelectorAll('.moment')].every((e) => getComputedStyle(e).opacity === '1')")


def test_it_asks_for_nothing_but_itself(browser: Browser, address: str) -> None:
    browser.open(address)
    assert {url for url in browser.asked_for if url != "about:blank"} == {address}


def test_on_paper_everything_is_open_and_visible(browser: Browser, address: str) -> None:
    browser.open(f"{address}#set_nx-MutualExclusion")
    browser.look("document.querySelector('details[open] .back').click()")
    browser.look("dispatchEvent(new Event('beforeprint'))")
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.look("document.querySelectorAll('details:not([open])').length") == 0
        assert browser.look(
            "[...document.querySelectorAll('.moment')].every((e) => getComputedStyle(e).opacity === '1')"
        )
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


def test_what_can_be_worked_has_a_name(browser: Browser, address: str) -> None:
    browser.open(f"{address}#set_nx-MutualExclusion")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    named: dict[str, list[str]] = {}
    for node in tree:
        if not node.get("ignored"):
            named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert named["slider"] == ["Moment"]
    assert {"Back", "Again"} <= set(named["button"])
    assert all(named["image"])
    assert len(named["columnheader"]) == len(MEANING) + 1
    assert len(named["rowheader"]) == len(FINDINGS)
