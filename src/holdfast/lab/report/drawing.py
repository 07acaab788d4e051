"""A trace, drawn in the terminal: a narrow lane per client and one for the key, time downwards, and text beside them.

The text has most of the width, because a beginner reads it first; the lanes only show at a glance which client holds
the lock when. So they are columns of single letters, like the branches that ``git log --graph`` draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from rich.text import Text

from holdfast.lab.report.lanes import clients_of, clock, exclaim, label, left, sentence, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderResult

    from holdfast.lab.report.trace import Moment, Trace

COLOURS: Final = ("blue", "magenta", "cyan", "green")  # of clients; red and yellow are for what goes wrong
LANE: Final = 4
WIDEST_WORDS: Final = 76  # a longer line is hard to read


class Glyphs(NamedTuple):
    idle: str
    held: str
    paused: str
    held_paused: str
    act: str
    crash: str
    pause: str
    fault: str
    line: str
    crossing: str
    arrow: str
    reply: str
    wrong: str
    key: str
    passes: str


PRETTY: Final = Glyphs("│", "█", "┊", "▒", "●", "✖", "‖", "◆", "─", "┼", "▶", "→", "✗", "┃", "┄")
PLAIN: Final = Glyphs("|", "#", ":", "%", "o", "X", "=", "!", "-", "+", ">", "->", "X", "|", ".")


class Drawing:
    """A rich renderable, which fills the width that it is given."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.clients = clients_of(trace)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = PRETTY if options.encoding.startswith("utf") else PLAIN
        yield from self.lines(console, glyphs, options.max_width)

    def lines(self, console: Console, glyphs: Glyphs, width: int) -> Iterator[Text]:
        key = 18 if width < 100 else 24
        words = min(WIDEST_WORDS, max(20, width - 13 - LANE * len(self.clients) - key))
        names = Text.assemble(
            *((f"{name:<{LANE}}", f"bold {self._colour(name)}") for name in self.clients), ("  key", "bold")
        )
        yield Text(" " * 9) + names
        yield self._row("", [self._lane(glyphs, name, None) for name in self.clients], glyphs, ("free", "dim"), Text())
        before: Moment | None = None
        for moment in self.trace.moments:
            time = "" if before is not None and before.at_us == moment.at_us else clock(moment.at_us)
            lines = self._text(moment, glyphs).wrap(console, words, tab_size=4)
            cells = self._key(moment, before, key)
            for index in range(max(len(lines), len(cells))):
                lanes = self._marks(glyphs, moment, before) if index == 0 else self._after(glyphs, moment)
                yield self._row(
                    time if index == 0 else "",
                    lanes,
                    glyphs,
                    cells[index] if index < len(cells) else ("", ""),
                    lines[index] if index < len(lines) else Text(),
                    key=key,
                    acts=moment if index == 0 else None,
                    alarm=bool(moment.violation),
                    present=moment.value is not None,
                )
            yield self._row("", self._after(glyphs, moment), glyphs, ("", ""), Text(), present=moment.value is not None)
            before = moment
        yield Text(f"\n{self._legend(glyphs)}", "dim")

    # The parts of a line ------------------------------------------------------------------------------------------

    def _row(
        self,
        time: str,
        lanes: list[tuple[str, str]],
        glyphs: Glyphs,
        cell: tuple[str, str],
        words: Text,
        *,
        key: int = 0,
        acts: Moment | None = None,
        alarm: bool = False,
        present: bool = False,
    ) -> Text:
        line = Text(no_wrap=True, overflow="crop")
        line.append(f"{time:>7}  ", "bold red" if alarm else "dim")
        asked = acts is not None and bool(acts.command) and acts.actor in self.clients
        start = self.clients.index(acts.actor) if asked and acts is not None else len(lanes)
        colour = self._colour(acts.actor) if asked and acts is not None else ""
        passing = acts is not None and acts.actor == "time"
        for index, (glyph, style) in enumerate(lanes):
            crossed = index > start and glyph in (glyphs.idle, " ")
            line.append(glyphs.crossing if crossed and glyph != " " else glyph if not crossed else glyphs.line, style)
            gap = glyphs.line * 3 if index >= start else glyphs.passes * 3 if passing else "   "
            line.append(gap, colour if index >= start else "dim")
        touched = asked or (acts is not None and acts.actor == "server")
        head = glyphs.arrow if asked else glyphs.act if touched else glyphs.key if present else " "
        line.append(head, colour or ("bold" if touched else "dim"))
        line.append(f" {cell[0]:<{key}}", cell[1])
        line.append("  ")
        line.append_text(words)
        line.rstrip()
        return line

    def _marks(self, glyphs: Glyphs, moment: Moment, before: Moment | None) -> list[tuple[str, str]]:
        """The lanes on the line of the moment itself, with a mark in the lane of its actor."""
        marks = [self._lane(glyphs, name, before) for name in self.clients]
        if moment.actor in self.clients:
            index = self.clients.index(moment.actor)
            sign = {"": glyphs.act, "crash": glyphs.crash, "pause": glyphs.pause, "stall": glyphs.pause}.get(
                moment.fault, glyphs.fault
            )
            marks[index] = (sign, "bold yellow" if moment.fault else f"bold {self._colour(moment.actor)}")
        return marks

    def _after(self, glyphs: Glyphs, moment: Moment) -> list[tuple[str, str]]:
        return [self._lane(glyphs, name, moment) for name in self.clients]

    def _lane(self, glyphs: Glyphs, name: str, state: Moment | None) -> tuple[str, str]:
        if state is None:
            return glyphs.idle, "dim"
        if name in state.dead:
            return " ", ""
        holds = name in state.holders
        colour = self._colour(name)
        if name in state.paused:
            return (glyphs.held_paused, colour) if holds else (glyphs.paused, "dim yellow")
        if holds:
            return glyphs.held, "bold red" if state.violation and len(state.holders) > 1 else colour
        return glyphs.idle, "dim"

    def _key(self, moment: Moment, before: Moment | None, width: int) -> list[tuple[str, str]]:
        """The key's value and ttl: bright where they have changed."""
        if moment.value is None:
            return [("free", "bold" if before is not None and before.value is not None else "dim")]
        new = before is None or before.value != moment.value
        renewed = new or before is None or (before.ttl_us is None) != (moment.ttl_us is None)
        if before is not None and before.ttl_us is not None and moment.ttl_us is not None:
            renewed |= moment.ttl_us != before.ttl_us - (moment.at_us - before.at_us)
        value = shorten(moment.value or '""', width)
        return [(value, "bold" if new else "dim"), (left(moment.ttl_us), "bold" if renewed else "dim")]

    def _text(self, moment: Moment, glyphs: Glyphs) -> Text:
        words = Text()
        actor, does = sentence(moment)
        words.append(actor, f"bold {self._colour(moment.actor)}" if moment.actor in self.clients else "bold")
        words.append(does)
        if moment.fault:
            words.append(f"  [{label(moment.fault)}]", "bold yellow")
        if moment.command:
            answer = f" {glyphs.reply} {moment.reply}" if moment.reply else ""
            words.append(f"\n{moment.command}{answer}", "dim")
        if moment.violation:
            words.append(f"\n{glyphs.wrong} {exclaim(moment.violation)}", "bold red")
        return words

    def _legend(self, glyphs: Glyphs) -> str:
        moments = self.trace.moments
        signs = {
            f"{glyphs.held} holds the lock": any(moment.holders for moment in moments),
            f"{glyphs.held_paused} holds it, but does not run": any({*m.holders} & {*m.paused} for m in moments),
            f"{glyphs.paused} does not run": any({*m.paused} - {*m.holders} for m in moments),
            f"{glyphs.crash} dies": any(m.fault == "crash" for m in moments),
            f"{glyphs.arrow} asks the server": any(moment.command for moment in moments),
            f"{glyphs.key} the key exists": any(moment.value is not None for moment in moments),
        }
        return "   ".join(sign for sign, used in signs.items() if used)

    def _colour(self, name: str) -> str:
        return COLOURS[self.clients.index(name) % len(COLOURS)]
