"""A trace, drawn as SVG: a lane per client and one for the key, time downwards.

The drawing has two forms: narrow, inside the page, where HTML beside it has the text; and wide, as a separate file that
includes the text. Each moment is one group with its own piece of every lane, down to the next moment, so that a page
can make later moments faint with a class.
"""

from __future__ import annotations

import textwrap
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Final

from holdfast.lab.report.lanes import clients_of, clock, exclaim, label, left, numbers_of, sentence, shorten

if TYPE_CHECKING:
    from holdfast.lab.report.trace import Moment, Trace

STYLE: Final = resources.files("holdfast.lab.report").joinpath("picture.css").read_text(encoding="utf-8")

WIDTH: Final = 368
WORDS: Final = 520  # the width of the text in the wide drawing
TOP: Final = 46  # below the names of the lanes
ROW: Final = 50
LINE: Final = 17
FIRST_LANE: Final = 88
KEY_TEXT: Final = 118
LETTERS: Final = 17  # how many letters of a value fit beside the key
WRAP: Final = 72  # letters in a line of text in the wide drawing
TAIL: Final = 4
MARGIN: Final = 14
SIGNS: Final = {"crash": "m-4 -4l8 8m0 -8l-8 8", "pause": "m-3 -4v8m6 -8v8", "stall": "m-3 -4v8m6 -8v8"}
LOST: Final = {"lost_request", "lost_reply"}


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """An element as markup. The content is markup already; attributes are escaped, and lose a trailing underscore."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def text(x: float, y: float, content: str, class_: str = "") -> str:
    return element("text", escape(content), x=_short(x), y=_short(y), class_=class_ or None)


class Picture:
    def __init__(self, trace: Trace, *, words: bool = False) -> None:
        self.trace = trace
        self.clients = clients_of(trace)
        self.numbers = numbers_of(trace)
        self.words = words
        self.width = WIDTH + (WORDS if words else 0)
        self.key = WIDTH - KEY_TEXT - 12
        pitch = min(66.0, (self.key - 58 - FIRST_LANE) / max(1, len(self.clients) - 1))
        self.lanes = {name: FIRST_LANE + index * pitch for index, name in enumerate(self.clients)}

    def inline(self, title: str) -> str:
        """The markup for a page that includes ``STYLE``."""
        return self._draw(title, 0, "")

    def standalone(self, title: str, subtitle: str) -> str:
        """A complete SVG file. It follows the reader's light or dark mode, also if it is shown as an image."""
        heading = text(12, 38, title, "title") + text(12, 59, subtitle, "soft")
        return self._draw(title, 76, f"<style>\n{STYLE}</style>", heading) + "\n"

    def _draw(self, title: str, offset: int, style: str, heading: str = "") -> str:
        grounds: list[str] = []  # drawn first, because they would cover the end of the previous moment
        rows: list[str] = []
        y = TOP + offset
        before: Moment | None = None
        for number, moment in enumerate(self.trace.moments, 1):
            height = self._height(moment)
            if number == len(self.trace.moments):
                height = max(height, ROW + TAIL)
            grounds.append(self._ground(number, moment, y, height))
            rows.append(self._moment(number, moment, before, y, height))
            before = moment
            y += height
        height = y + (22 if self.words else 10)
        margin = MARGIN if self.words else 0
        paper = {"width": self.width + 2 * margin - 1, "height": height - 1, "rx": 10}
        body = [heading, *grounds, self._names(offset), *rows]
        return element(
            "svg",
            "\n".join(
                [
                    element("title", escape(title)),
                    *([style, element("rect", x=0.5 - margin, y=0.5, **paper, class_="ground")] if style else []),
                    *(part for part in body if part),
                ]
            ),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"{-margin} 0 {self.width + 2 * margin} {height}",
            width=self.width + 2 * margin,
            height=height,
            class_="hf",
            role="img",
            aria_label=title,
        )

    def _names(self, offset: int) -> str:
        y = 20 + offset
        parts = []
        for name, x in self.lanes.items():
            disc = element("circle", cx=_short(x), cy=y, r=11, class_="name")
            stem = element("line", x1=_short(x), y1=y + 11, x2=_short(x), y2=TOP + offset, class_="idle")
            parts.append(element("g", stem + disc + text(x, y + 4, name, "letter"), class_=self._of(name)))
        absent = element("line", x1=self.key, y1=y + 14, x2=self.key, y2=TOP + offset, class_="absent")
        parts.append(absent + text(self.key - 10, y + 4, "the key", "new"))
        return "".join(parts)

    def _height(self, moment: Moment) -> int:
        return max(ROW, LINE * len(self._lines(moment)) + 20) if self.words else ROW

    def _lines(self, moment: Moment) -> list[tuple[str, str]]:
        """The text of the wide drawing, with the class of each line."""
        answer = f" → {moment.reply}" if moment.reply else ""
        parts = [("".join(sentence(moment)), "words")]
        if moment.command:
            parts.append((moment.command + answer, "code soft"))
        if moment.violation:
            parts.append((f"✗ {exclaim(moment.violation)}", "words wrong"))
        return [(line, class_) for words, class_ in parts for line in textwrap.wrap(words, WRAP) or [""]]

    # One moment -----------------------------------------------------------------------------------------------------

    def _ground(self, number: int, moment: Moment, y: int, height: int) -> str:
        last = moment is self.trace.moments[-1]
        spot = {"x": 2, "y": y - 19, "width": self.width - 4, "height": height + (27 if last else -4), "rx": 8}
        alarm = element("rect", **spot, class_="alarm") if moment.violation else ""
        return element("g", alarm + element("rect", **spot, class_="spot"), class_="moment", data_number=number)

    def _moment(self, number: int, moment: Moment, before: Moment | None, y: int, height: int) -> str:
        parts = [element("title", escape("".join(sentence(moment))))]
        parts += [self._lane(name, moment, y, y + height) for name in self.clients]
        parts.append(self._key_lane(moment, before, y, y + height))
        parts.append(self._action(moment, y))
        if moment.violation:
            parts.append(text(12, y + 19, "✗", "wrong"))
        parts.append(text(12, y + 4, self.numbers[number - 1], "wrong" if moment.violation else "new"))
        if before is None or before.at_us != moment.at_us:
            parts.append(text(FIRST_LANE - 20, y + 4, clock(moment.at_us), "soft small end"))
        if self.words:
            parts += [
                text(WIDTH + 8, y + 4 + LINE * index, line, class_)
                for index, (line, class_) in enumerate(self._lines(moment))
            ]
        return element("g", "".join(parts), class_="moment", data_number=number)

    def _lane(self, name: str, moment: Moment, top: int, bottom: int) -> str:
        if name in moment.dead:
            return ""
        x = _short(self.lanes[name])
        paused = name in moment.paused
        if name not in moment.holders:
            return element("line", x1=x, y1=top, x2=x, y2=bottom, class_="halted" if paused else "idle")
        clash = " clash" if moment.violation and len(moment.holders) > 1 else ""
        halted = " halted" if paused else ""
        x = _short(self.lanes[name] - 7)
        bar = element("rect", x=x, y=top, width=14, height=bottom - top, class_=f"held{halted}")
        sides = element("path", d=f"M{x} {top}V{bottom}m14 0V{top}", class_=f"side{halted}{clash}")
        return element("g", bar + (sides if halted or clash else ""), class_=self._of(name))

    def _key_lane(self, moment: Moment, before: Moment | None, top: int, bottom: int) -> str:
        text_x = self.key + 14
        new = before is None or before.value != moment.value
        if moment.value is None:
            line = element("line", x1=self.key, y1=top, x2=self.key, y2=bottom, class_="absent")
            return line + text(text_x, top + 4, "free", "small new" if new else "small soft")
        bar = element("rect", x=self.key - 3, y=top, width=6, height=bottom - top, class_="present")
        value = text(text_x, top + 2, shorten(moment.value or '""', LETTERS), "code new" if new else "code soft")
        return bar + value + text(text_x, top + 16, left(moment.ttl_us), "soft small")

    def _action(self, moment: Moment, y: int) -> str:
        x = self.lanes.get(moment.actor)
        parts = []
        if moment.actor == "time":
            parts.append(element("line", x1=FIRST_LANE - 12, y1=y, x2=self.key - 10, y2=y, class_="passes"))
        elif x is not None and moment.command:
            parts.append(self._message(moment, x, y))
        at = x if x is not None else self.key
        if moment.fault in SIGNS:
            parts.append(element("circle", cx=_short(at), cy=y, r=9, class_="badge"))
            parts.append(element("path", d=f"M{_short(at)} {y}{SIGNS[moment.fault]}", class_="cross"))
        elif moment.actor != "time":
            parts.append(element("circle", cx=_short(at), cy=y, r=5.5, class_="act"))
        if moment.fault:
            name = label(moment.fault)
            wide = 6.2 * len(name) + 12
            start = min(at + 14, self.key - 8 - wide) if x is not None else at - 12 - wide
            down = y + 7 if moment.command or start < at else y - 8
            badge = element("rect", x=_short(start), y=down, width=_short(wide), height=16, rx=8, class_="badge")
            parts.append(badge + text(start + wide / 2, down + 11.5, name, "fault middle"))
        return element("g", "".join(parts), class_=self._of(moment.actor))

    def _message(self, moment: Moment, x: float, y: int) -> str:
        """The request as an arrow to the key, which stops short if the request, or its reply, is lost."""
        end = self.key - 5.0
        half = (x + end) / 2
        verb = text(end - 8, y - 6, moment.command.split()[0], "asks halo")
        cross = element("path", d=f"M{_short(half - 4)} {y - 4}l8 8m0 -8l-8 8", class_="cross")
        if moment.fault == "lost_request":
            return element("path", d=f"M{_short(x)} {y}H{_short(half)}", class_="arrow") + cross + verb
        kind = "arrow unanswered" if moment.fault == "lost_reply" else "arrow"
        line = element("path", d=f"M{_short(x)} {y}H{_short(end - 6)}", class_=kind)
        head = element("path", d=f"M{_short(end)} {y}l-8 -4v8z", class_="head")
        return line + head + (cross if moment.fault in LOST else "") + verb

    def _of(self, name: str) -> str:
        return f"of-{'abcd'[self.clients.index(name) % 4]}" if name in self.lanes else "of-key"


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
