"""The results of a search, as one self-contained HTML page.

The matrix is on top, and its broken cells link to their drawings. A script lets the reader step through a drawing; it
only adds classes, so without it the page shows the drawings complete. Style and script are part of the page, and its
policy forbids loading anything else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Final

from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN
from holdfast.lab.report.lanes import clock, count, exclaim, heading, label, numbers_of, sentence
from holdfast.lab.report.picture import STYLE, Picture, element
from holdfast.lab.search.faults import KEEPS, LOSES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.lab.report.trace import Cell, Findings, Moment

_FILES: Final = resources.files("holdfast.lab.report")
_PAGE_STYLE: Final = _FILES.joinpath("page.css").read_text(encoding="utf-8") + STYLE
_SCRIPT: Final = _FILES.joinpath("page.js").read_text(encoding="utf-8")
_SIGNS: Final = {HOLDS: "✓", BROKEN: "✗", UNKNOWN: "?"}
_SERVERS: Final = {
    KEEPS: (
        "While the server keeps its data",
        "With crashes, pauses, wrong clocks of clients, and messages that are lost, late or doubled.",
    ),
    LOSES: (
        "If the server loses its data, or its clock jumps",
        "The same, and restarts without data, failovers that lack the last writes, evicted keys, jumps of its clock.",
    ),
}


def write_page(findings: Sequence[Findings], meaning: Mapping[str, str], facts: Mapping[str, object]) -> str:
    """The page as HTML. ``facts`` are shown at the top: the seed, the number of clients, and so on."""
    pitfalls = [_pitfalls_of(found, meaning) for found in findings]
    body = "\n".join(
        [
            "<h1>Locks, and the pitfalls in them</h1>",
            "<p>Each lock was driven through every order of its steps, and through faults, by a search that knows "
            "nothing but what must hold. Where something breaks, the shortest way there is drawn below: "
            "choose a cell that says <em>broken</em>.</p>",
            _facts(findings, facts),
            *(_section(findings, server) for server in (KEEPS, LOSES) if any(found.of(server) for found in findings)),
            _meanings(findings, meaning),
            *filter(None, pitfalls),
        ]
    )
    head = "\n".join(
        [
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            "<title>Holdfast: locks, and the pitfalls in them</title>",
            f"<style>\n{_PAGE_STYLE}</style>",
        ]
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n<main>\n{body}\n</main>\n'
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"


def _facts(findings: Sequence[Findings], facts: Mapping[str, object]) -> str:
    total = {"states": f"{sum(found.states for found in findings):,}", **facts}
    return element(
        "ul",
        "".join(f"<li>{escape(name)} <b>{escape(str(value))}</b></li>" for name, value in total.items()),
        class_="facts",
    )


# The matrix -----------------------------------------------------------------------------------------------------------


def _invariants(findings: Sequence[Findings]) -> list[str]:
    return list(dict.fromkeys(cell.invariant for found in findings for cell in found.cells))


def _spaced(name: str) -> str:
    """``OwnerOnlyRelease`` as words, so that a narrow column can break it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)


def _section(findings: Sequence[Findings], server: str) -> str:
    head, text = _SERVERS[server]
    return f"<h2>{head}</h2>\n<p>{text}</p>\n{_matrix(findings, server)}"


def _matrix(findings: Sequence[Findings], server: str) -> str:
    # A table has these roles anyway. On a phone it is laid out as cards, and browsers then drop implicit roles.
    invariants = _invariants(findings)
    heads = "".join(f'<th scope="col" role="columnheader">{escape(_spaced(name))}</th>' for name in invariants)
    rows = []
    for found in findings:
        cells = {cell.invariant: cell for cell in found.of(server)}
        name = element("th", escape(found.recipe).replace(":", ":<wbr>"), scope="row", role="rowheader")
        row = "".join(f'<td role="cell">{_cell(found, cells.get(invariant))}</td>' for invariant in invariants)
        rows.append(f'<tr role="row">{name}{row}</tr>')
    return (
        f'<table class="matrix" role="table" aria-label="Recipes and invariants: {_SERVERS[server][0]}">\n'
        f'<thead role="rowgroup"><tr role="row"><th scope="col" role="columnheader">recipe</th>{heads}</tr></thead>\n'
        '<tbody role="rowgroup">\n' + "\n".join(rows) + "\n</tbody>\n</table>"
    )


def _cell(found: Findings, cell: Cell | None) -> str:
    if cell is None:
        return ""
    of = element("span", escape(_spaced(cell.invariant)), class_="of")
    if cell.trace is not None:
        steps = f"{cell.trace.steps} step{'' if cell.trace.steps == 1 else 's'}"
        text = f"{of}{_SIGNS[cell.verdict]} {cell.verdict} <small>{steps}</small>"
        drawn = next(each for each in found.pitfalls if each.trace == cell.trace and each.invariant == cell.invariant)
        return element("a", text, class_=f"cell {cell.verdict}", href=f"#{_anchor(drawn)}")
    if cell.silent:
        return element("span", f"{of}– <small>does not apply</small>", class_=f"cell {cell.verdict}")
    states = f"<small>{count(cell.states)} {'so far' if cell.so_far else 'states'}</small>"
    return element("span", f"{of}{_SIGNS[cell.verdict]} {cell.verdict} {states}", class_=f"cell {cell.verdict}")


def _meanings(findings: Sequence[Findings], meaning: Mapping[str, str]) -> str:
    rows = "".join(
        f"<div><dt>{escape(_spaced(name))}</dt><dd>{escape(meaning.get(name, ''))}</dd></div>"
        for name in _invariants(findings)
    )
    return f'<h2>What was to hold</h2>\n<dl class="meanings">{rows}</dl>'


# The pitfalls ---------------------------------------------------------------------------------------------------------


def _anchor(cell: Cell) -> str:
    name = f"{cell.recipe}-{cell.invariant}{'' if cell.server == KEEPS else f'-{cell.server}'}"
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _pitfalls_of(found: Findings, meaning: Mapping[str, str]) -> str:
    pitfalls = [_pitfall(cell, meaning) for cell in found.pitfalls]
    if not pitfalls:
        return ""
    number = f"{len(pitfalls)} pitfall{'' if len(pitfalls) == 1 else 's'}"
    states = f"{found.states:,} states, {'all within the bounds' if found.exhausted else 'as far as time allowed'}"
    return "\n".join(
        [f"<h2><code>{escape(found.recipe)}</code></h2>", f'<p class="quiet">{number} in {states}.</p>', *pitfalls]
    )


def _pitfall(cell: Cell, meaning: Mapping[str, str]) -> str:
    trace = cell.trace
    assert trace is not None
    how, meant = heading(cell, meaning)
    last = len(trace.moments)
    picture = Picture(trace).inline(f"{cell.recipe}, {_spaced(cell.invariant)}: {how}")
    numbered = enumerate(zip(numbers_of(trace), trace.moments, strict=True), 1)
    story = "".join(_story(number, step, moment) for number, (step, moment) in numbered)
    controls = (
        '<button type="button" class="back">Back</button>'
        f'<input type="range" class="slider" min="1" max="{last}" value="{last}" step="1" aria-label="Moment">'
        '<button type="button" class="on">Next</button><output class="output"></output>'
    )
    return "\n".join(
        [
            f'<details class="pitfall" id="{_anchor(cell)}" open>',
            f'<summary><h3>{escape(_spaced(cell.invariant))}</h3> <span class="how">{escape(how)}</span></summary>',
            f'<div class="body"><p class="meaning">{escape(meant)}</p>',
            f'<div class="drawing">{picture}</div>',
            f'<div class="steps" hidden><div class="controls">{controls}</div>',
            '<div class="now-words" aria-live="polite"></div></div>',
            f'<ol class="story">{story}</ol></div>',
            "</details>",
        ]
    )


def _story(number: int, step: str, moment: Moment) -> str:
    actor, does = sentence(moment)
    item = f'<span class="step">{step}</span>'
    item += f'<span class="when">{escape(clock(moment.at_us))}</span>'
    item += (f"<b>{escape(actor)}</b>" if actor else "") + escape(does)
    if moment.fault:
        item += f' <span class="tag">{escape(label(moment.fault))}</span>'
    if moment.command:
        item += f"<code>{escape(moment.command)}{f' → {escape(moment.reply)}' if moment.reply else ''}</code>"
    if moment.violation:
        item += f'<strong class="wrong">{escape(exclaim(moment.violation))}</strong>'
    return element("li", item, data_number=number)
