"""``holdfast lab``: search recipes for mistakes, draw what was found, and perform it on a real server.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.text import Text

from holdfast.blocking import connect
from holdfast.cli import Voice
from holdfast.cli.searching import (
    RECIPE,
    SEED,
    Failure,
    bounds,
    changed_options,
    one_of,
    output_file,
    progress_bar,
    search,
    searches,
    settings,
    survey,
    within,
)
from holdfast.errors import HoldfastError, InvalidConfig
from holdfast.lab.invariants.history import HOLDS, UNKNOWN
from holdfast.lab.search.faults import FAULTS, LOSES
from holdfast.untrusted import printable

if TYPE_CHECKING:
    from holdfast.lab.report.trace import Cell, Findings, Trace

NO_FILE: Final = 1  # there is no trace to save
NOT_CONFIRMED: Final = 1
HOW_FAR: Final = (
    "complete: every run with that number of faults was explored (not complete: not even every run without a fault, so "
    "all is unknown); in part: as many runs as the budget allowed"
)


def console() -> Console:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows a question mark
    return Console(highlight=False)


class LabGroup(click.Group):
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Kinds of fault"):
            formatter.write_dl(list(FAULTS.items()))
        try:
            found = search()
        except Failure:
            return  # help works without the extra that a search needs
        with formatter.section("Recipes"):
            formatter.write_text(", ".join(found.ROWS))
        with formatter.section("Primitives"):
            formatter.write_text(", ".join(found.PRIMITIVES))
        with formatter.section("Primitives with late requests"):
            formatter.write_text(", ".join(found.LATE_REQUESTS))


@click.group(
    cls=LabGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    short_help="Search locks for their pitfalls, and draw them.",
)
@RECIPE
@searches
@click.option("--json", "as_json", is_flag=True, help="Print the matrix as JSON.")
@click.pass_context
def lab(
    ctx: click.Context,
    /,
    *,
    recipes: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> int:
    """Search locks that are in use for their pitfalls, and print recipe by invariant.

    Each recipe, Holdfast's own lock first, runs through every order of its steps, and through faults, until all is
    explored or the budget is used up. A cell holds (with the number of states), is broken (with the number of steps;
    'show' draws it), or is unknown. What a server that loses its data breaks is a table of its own.

    DURATION is in seconds, or has a unit: 250ms, 90s, 5m, 1h.
    """
    if ctx.invoked_subcommand is not None:
        for param in ctx.command.params:
            if param.name and ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE:
                command = ctx.invoked_subcommand
                found = lab.get_command(ctx, command)
                takes_it = found is not None and any(param.opts[0] in other.opts for other in found.params)
                after = f"write it after: holdfast lab {command} {param.opts[0]} ..." if takes_it else "leave it out"
                raise click.UsageError(f"{param.opts[0]} is before {command!r}; {after}", ctx)
        return 0
    asked = settings(**options)
    findings = survey(recipes, asked)
    if as_json:
        click.echo(json.dumps(as_data(findings, asked["seed"]), indent=2))
        return 0
    print_matrix(findings, asked)
    return 0


def as_data(findings: Sequence[Findings], seed: int) -> dict[str, Any]:
    cells = [cell for found in findings for cell in found.cells]
    return {
        "seed": seed,
        "states": sum(found.states for found in findings),
        "cells": [
            {
                "recipe": cell.recipe,
                "invariant": cell.invariant,
                "verdict": cell.verdict,
                "states": cell.states,
                "steps": cell.trace.steps if cell.trace else None,
                "faults": list(cell.trace.faults) if cell.trace else [],
                "server": cell.server,
            }
            for cell in cells
        ],
    }


def print_matrix(findings: Sequence[Findings], asked: dict[str, Any]) -> None:
    from holdfast.lab.report.matrix import Matrix

    out = console()
    matrix = Matrix(findings)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = max(80, matrix.width)  # a file has no width
    out.print(matrix)
    states = sum(found.states for found in findings)
    out.print(f"\n{states:,} states; {bounds(asked)}", style="dim", soft_wrap=True)
    invariants = search().INVARIANTS
    broken = sorted(
        (cell for found in findings for cell in found.cells if cell.trace),
        key=lambda cell: (cell.server == LOSES, invariants.index(cell.invariant)),
    )
    if broken:
        example = f"holdfast lab show {broken[0].recipe} {broken[0].invariant}{changed_options(asked)}"
        out.print(f"{example} draws how that breaks", style="dim", soft_wrap=True)


@lab.command(short_help="Draw how a recipe breaks an invariant.")
@click.argument("recipe", callback=one_of("ROWS"))
@click.argument("invariant", callback=one_of("INVARIANTS"))
@searches
@click.option("--save", callback=output_file, metavar="FILE", help="Write the trace, for 'holdfast lab replay'.")
@click.option("--svg", callback=output_file, metavar="FILE", help="Write the drawing as an image.")
def show(
    *,
    recipe: str,
    invariant: str,
    save: Path | None,
    svg: Path | None,
    **options: Any,
) -> int:
    """Find the simplest way in which RECIPE breaks INVARIANT, and draw it.

    The run with the fewest and mildest faults is preferred, then the one with the fewest steps.

    The drawing has a lane for each client, and one for the key with its value and the rest of its ttl; time runs down.
    """
    asked = settings(**options)
    meaning: dict[str, str] = search().MEANING
    with progress_bar() as progress:
        cells: list[Cell] = search().find(recipe, invariant, **asked, progress=progress)
    out = console()
    cell = next((cell for cell in cells if cell.trace is not None), None)
    if cell is None or cell.trace is None:
        kept, *losing = cells
        out.print(Text.assemble((f"{recipe}, {invariant}: ", "bold"), outcome(kept)), soft_wrap=True)
        for other in losing:
            if not other.silent:
                out.print(Text.assemble(("If the server loses its data, or its clock jumps: ", "bold"), outcome(other)))
        out.print(f"{meaning.get(invariant, '')}", markup=False)
        out.print(f"\n{bounds(asked)}", style="dim", soft_wrap=True)
        if save or svg:
            Voice(as_json=False, quiet=False).say("nothing", "there is no trace to write", error=True)
        return NO_FILE if save or svg else 0
    # Files first: the reader of the drawing (head, less) may close the pipe early.
    if save:
        save.write_text(cell.trace.to_json() + "\n", encoding="utf-8")
    if svg:
        from holdfast.lab.report.lanes import heading
        from holdfast.lab.report.picture import Picture

        how, meant = heading(cell, meaning)
        picture = Picture(cell.trace, words=True).standalone(f"{recipe}: {invariant}", f"{meant} It is {how}.")
        svg.write_text(picture, encoding="utf-8")
    draw(out, cell, meaning)
    kept = cells[0]
    if kept.trace is None:
        found = outcome(kept) if kept.verdict == HOLDS else f"is not broken in {kept.states:,} states so far."
        command = f"holdfast lab show {recipe} {invariant}{changed_options(asked)} --spare-server"
        out.print(Text(f"\nWhile the server keeps its data, and its clock does not jump, {invariant} {found}", "bold"))
        if kept.verdict != HOLDS:
            out.print(f"{command} searches that to the end.", soft_wrap=True)
    out.print(f"\n{cell.states:,} states; {bounds(asked)}", style="dim", soft_wrap=True)
    return 0


def outcome(cell: Cell) -> str:
    """What the search says of a cell without a trace."""
    if cell.silent:
        return f"does not apply to {cell.recipe}."
    if cell.verdict == UNKNOWN:
        return f"unknown after {cell.states:,} states: a larger --budget explores more."
    so_far = " Not every single fault was tried: a larger --budget explores more." if cell.so_far else ""
    return f"holds in the {cell.states:,} states that were explored.{so_far}"


def draw(out: Console, cell: Cell, meaning: dict[str, str]) -> None:
    from holdfast.lab.report.drawing import Drawing
    from holdfast.lab.report.lanes import exclaim, heading

    assert cell.trace is not None
    how, meant = heading(cell, meaning)
    out.print(Text.assemble((f"{cell.recipe}, {cell.invariant}: ", "bold"), (how, "bold red")))
    out.print()
    out.print(Drawing(cell.trace))
    out.print()
    why = next((moment.violation for moment in reversed(cell.trace.moments) if moment.violation), "")
    if why:
        out.print(Text(exclaim(why), "bold red"))
    out.print(Text.assemble("The invariant ", (cell.invariant, "bold"), f": {meant}"))


@lab.command(short_help="Perform a saved trace on a real server.")
@click.argument("trace", type=click.File(encoding="utf-8"))
@click.option("--url", metavar="URL", help="The server.  [default: HOLDFAST_URL, else local://, which is this machine]")
def replay(*, trace: Any, url: str | None) -> int:
    """Perform the schedule of TRACE, a file ('-' for stdin) from 'holdfast lab show --save', on a real server.

    Each step is printed when it happens. Exit code 0 if the outcome is confirmed, 1 if not, 69 if a real server cannot
    perform the trace.
    """
    search()
    from holdfast.lab.replay.perform import perform

    schedule = read_trace(trace)
    url = url or os.environ.get("HOLDFAST_URL")
    if not url:
        url = "local://"
        Voice(as_json=False, quiet=False).say("local", "no server was named, so local:// is used; name one with --url")
    out = console()
    try:
        with connect(url) as client:
            client.lock("foo").locked()  # if no server can be used, the error is that of every other command
        outcome = perform(schedule, url, say=lambda line: out.print(printable(line), markup=False, soft_wrap=True))
    except InvalidConfig as error:
        raise click.UsageError(str(error)) from error
    except HoldfastError as error:
        raise Failure(str(error)) from error
    verdict = ("confirmed", "bold green") if outcome.confirmed else ("not confirmed", "bold red")
    out.print(Text.assemble(verdict, f": {printable(outcome.why)}"), soft_wrap=True)
    return 0 if outcome.confirmed else NOT_CONFIRMED


def read_trace(file: Any) -> Trace:
    from holdfast.lab.report.trace import Trace

    try:
        trace = Trace.from_json(file.read())
        if len(trace.moments) != len(trace.choices):
            raise ValueError("a schedule and a story of different length")
        return trace
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise click.UsageError(
            f"{file.name!r} is not a trace; 'holdfast lab show RECIPE INVARIANT --save FILE' writes one"
        ) from error


@lab.command(short_help="Search semaphores, latches, elections and the rest.")
@click.argument("names", nargs=-1, metavar="[NAME]...", callback=one_of("SUBJECTS"))
@SEED
@within("2m")
def primitives(*, names: tuple[str, ...], seed: int, budget: float) -> int:
    """Search the other primitives of Holdfast (all, or the named ones), as 'lab' does with locks.

    Each search has three clients and at most two faults of clients and messages. A row with 'late:' before its name
    has two clients, and its first fault is a request that arrives at any later time.
    """
    search()
    from holdfast.lab.surveys.primitives import PRIMITIVES, try_all

    out = console()
    states = 0
    for tried in try_all(names or tuple(PRIMITIVES), budget=budget, seed=seed):
        out.print(tried.heading, markup=False, soft_wrap=True, style="bold")
        for line in tried.details:
            out.print(line, markup=False, soft_wrap=True)
        states += tried.states
    out.print(f"\n{HOW_FAR}", style="dim", soft_wrap=True)
    out.print(f"{states:,} states; budget {budget:g} s, seed {seed}", style="dim", soft_wrap=True)
    return 0


@lab.command(short_help="Can two clients win that see the same expired lock?")
def question() -> int:
    """Answer a question that the texts about GETSET leave open: can two clients win?

    N clients read the same past deadline, and all send GETSET. Both ways to decide the winner are searched in every
    interleaving, with deadlines that may be equal and with deadlines that all differ.
    """
    search()
    from holdfast.lab.surveys.question import answers

    out = console()
    for answer in answers():
        out.print(str(answer), highlight=False, soft_wrap=True)
    return 0


@lab.command(short_help="Write a page with the matrix and every drawing.")
@click.option("--html", required=True, callback=output_file, metavar="FILE", help="The page to write.")
@RECIPE
@searches
def report(*, html: Path, recipes: tuple[str, ...], **options: Any) -> int:
    """Search, and write one self-contained page: the matrix, and a drawing of every pitfall.

    You can step through the drawings.
    """
    from holdfast.lab.report.lanes import label
    from holdfast.lab.report.page import write_page

    asked = settings(**options)
    findings = survey(recipes, asked)
    is_default = set(asked["faults"]) == set(search().DEFAULT_FAULTS)
    names = "all kinds" if is_default else ", ".join(asked["faults"]) or "none"
    spared = " (no fault while holding)" if asked["spares_holders"] else ""
    facts = {"clients": asked["clients"], "faults": label(names) + spared, "seed": asked["seed"]}
    page = write_page(findings, search().MEANING, facts)
    try:
        html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise Failure(f"{str(html)!r} cannot be written: {error.strerror}") from error
    pitfalls = sum(len(found.pitfalls) for found in findings)
    states = sum(found.states for found in findings)
    out = console()
    out.print(f"{html}: {pitfalls} pitfalls in {states:,} states; {bounds(asked)}", markup=False, soft_wrap=True)
    return 0
