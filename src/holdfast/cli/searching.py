"""Common parts of the commands of ``holdfast lab``: the options of a search, its progress, and its bounds as text.

A search needs an extra (Lua, by lupa), so it is imported only when a search is asked for: ``--help`` works without.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from holdfast.cli import UNAVAILABLE, duration
from holdfast.errors import how_to_install

if TYPE_CHECKING:
    from holdfast.lab.report.trace import Findings

NONE: Final = "none"
CLIENTS: Final = 3


class Failure(click.ClickException):
    """The command is valid, but cannot be carried out here."""

    exit_code = UNAVAILABLE


def search() -> ModuleType:
    """The module that searches; raises Failure, which says how to install what it needs."""
    try:
        return import_module("holdfast.lab.surveys.recipes")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lupa":
            raise
        raise Failure(f"the lab runs the locks' own Lua, by lupa; run: {how_to_install('lab')}") from error


# Options ------------------------------------------------------------------------------------------------------------


def one_of(what: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback for names that the search knows; ``what`` is a list in the module that searches, such as ``ROWS``."""

    def check(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if not value or ctx.resilient_parsing:
            return value
        known = {name.lower(): name for name in getattr(search(), what)}
        if param.name == "faults":
            known[NONE] = NONE
        found = []
        for name in [value] if isinstance(value, str) else value:
            if name.lower() not in known:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(known.values())}", ctx, param)
            found.append(known[name.lower()])
        return found[0] if isinstance(value, str) else tuple(dict.fromkeys(found))

    return check


RECIPE: Final = click.option(
    "--recipe",
    "recipes",
    multiple=True,
    callback=one_of("ROWS"),
    metavar="NAME",
    help="Search only this recipe; may be repeated.",
)
SEED: Final = click.option("--seed", type=int, default=0, help="Seed of the random walks.  [default: 0]")


def within(default: str) -> Callable[[Any], Any]:
    text = f"How long the whole search may take.  [default: {default}]"
    return click.option("--budget", callback=duration(0.01), metavar="DURATION", default=default, help=text)


SEARCH_OPTIONS: Final = (
    click.option(
        "--fault",
        "faults",
        multiple=True,
        callback=one_of("FAULTS"),
        metavar="KIND",
        help="Try only this fault; may be repeated. 'none': no fault.  "
        "[default: all but reshard, refused and unconfirmed]",
    ),
    click.option("--spare-holders", is_flag=True, help="No fault happens to a client while it holds the lock."),
    click.option("--spare-server", is_flag=True, help="The server keeps its data, and its clock does not jump."),
    click.option("--clients", type=click.IntRange(2, 4), default=CLIENTS, help="Number of clients.  [default: 3]"),
    SEED,
    within("30s"),
)


def searches(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a search."""
    for option in reversed(SEARCH_OPTIONS):
        command = option(command)
    return command


def output_file(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """The file to write, which is checked before the search."""
    if value is None:
        return None
    path = Path(value)
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise click.BadParameter(f"{value!r} cannot be written", ctx, param)
    return path


def settings(
    *, faults: tuple[str, ...], spare_holders: bool, spare_server: bool, clients: int, seed: int, budget: float
) -> dict[str, Any]:
    """The arguments of the search, from the options of the command."""
    if NONE in faults and len(faults) > 1:
        raise click.UsageError(f"--fault {NONE} and other faults contradict each other")
    chosen = tuple(name for name in faults or search().DEFAULT_FAULTS if name != NONE)
    return {
        "faults": chosen,
        "spares_holders": spare_holders,
        "spares_server": spare_server,
        "clients": clients,
        "seed": seed,
        "budget": budget,
    }


# Searching ------------------------------------------------------------------------------------------------------------


@contextmanager
def progress_bar() -> Iterator[Callable[[Any], None] | None]:
    """A progress bar on stderr, if that is a terminal."""
    err = Console(stderr=True, highlight=False)
    if not err.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[counts]}", style="dim"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("searching", total=None, counts="")

        def show(at: Any) -> None:
            counts = f"{at.done} of {at.of} recipes, {at.states:,} states, {at.broken} broken"
            bar.update(task, description=at.row, completed=at.done, total=at.of, counts=counts)

        yield show


def progress_lines() -> Callable[[Any], None]:
    """A line on stderr for each finished recipe, for logs."""
    done = 0

    def show(at: Any) -> None:
        nonlocal done
        if at.done > done:
            done = at.done
            with suppress(OSError):  # stderr is closed: continue the search
                click.echo(f"{at.row}: {at.states:,} states, {at.broken} broken; {done} of {at.of} recipes", err=True)

    return show


def survey(recipes: tuple[str, ...], asked: dict[str, Any]) -> list[Findings]:
    module = search()
    with progress_bar() as bar:
        progress = bar or progress_lines()
        findings: list[Findings] = module.survey(recipes or module.ROWS, **asked, progress=progress)
    return findings


def bounds(asked: dict[str, Any]) -> str:
    """The bounds of a search as text, always with the seed, which reproduces random walks."""
    faults = asked["faults"]
    going_wrong = "every fault" if set(faults) == set(search().DEFAULT_FAULTS) else ", ".join(faults) or "no fault"
    if asked["spares_holders"]:
        going_wrong += " (no fault while holding)"
    if asked["spares_server"]:
        going_wrong += " of a server that keeps its data"
    return f"{asked['clients']} clients, {going_wrong}, budget {asked['budget']:g} s, seed {asked['seed']}"


def changed_options(asked: dict[str, Any]) -> str:
    """The options that differ from the defaults, for another command."""
    is_default = set(asked["faults"]) == set(search().DEFAULT_FAULTS)
    words = "" if is_default else "".join(f" --fault {kind}" for kind in asked["faults"])
    if not asked["faults"]:
        words = f" --fault {NONE}"
    words += " --spare-holders" if asked["spares_holders"] else ""
    words += " --spare-server" if asked["spares_server"] else ""
    return words + (f" --clients {asked['clients']}" if asked["clients"] != CLIENTS else "")
