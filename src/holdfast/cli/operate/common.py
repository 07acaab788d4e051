"""What the commands for operators share: the server, the two kinds of output, and exit codes.

Results go to stdout, as a table or (``--json``) as JSON; messages go to stderr. A table fits the terminal. Where stdout
is no terminal, nothing is cut off. Text from a server is shown with control characters escaped.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import click
from rich.console import Console

from holdfast.blocking import Client, connect
from holdfast.cli import UNAVAILABLE, URL_HELP, USAGE
from holdfast.errors import HoldfastError, InvalidConfig, InvalidName, Unavailable, Unsupported
from holdfast.untrusted import printable

NOTHING: Final = 1  # there was nothing to break

_WIDE: Final = 10_000  # columns of an output that is no terminal
_LOCAL: Final = (
    "no server was named, so this is about locks on this machine (local://); name a server with --url or HOLDFAST_URL"
)


_SHARED: Final = (
    click.Option(["--url"], metavar="URL", help=URL_HELP),
    click.Option(["--json", "as_json"], is_flag=True, help="Write JSON to stdout."),
)


class Output:
    """Where a command writes."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def console(self) -> Console:
        """For tables. NO_COLOR and the width of the terminal are respected."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows a question mark
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDE
        return Console(highlight=False, markup=False, emoji=False, width=width)

    def json(self, value: Any, *, indent: int | None = 2) -> None:
        text = json.dumps(value, indent=indent, ensure_ascii=False)
        click.echo("".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text))

    def say(self, message: str) -> None:
        """A message for people."""
        click.echo("holdfast: " + printable(message.replace("\n", " ")), err=True)


def _escaped(char: str) -> str:
    """A character of a JSON text as its escape: json.dumps leaves those as they are that only a terminal acts on."""
    return f"\\u{ord(char):04x}" if char <= "\uffff" else json.dumps(char)[1:-1]


def operator_command(**settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """A command whose function gets a client and an Output first. An error of Holdfast becomes an exit code."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        def call(*, url: str | None, as_json: bool, **options: Any) -> int:
            output = Output(as_json=as_json)
            return run_on(click.get_current_context(), url, output, lambda client: function(client, output, **options))

        return click.Command(
            function.__name__.rstrip("_"),
            {"help_option_names": ["-h", "--help"], "max_content_width": 100},
            callback=call,
            params=[*reversed(getattr(function, "__click_params__", [])), *_SHARED],
            help=inspect.getdoc(function),
            **settings,
        )

    return decorate


def run_on(
    ctx: click.Context, url: str | None, output: Output, act: Callable[[Client], int | None], **options: Any
) -> int:
    """Run a command on a client of that server, with these options of ``connect``. Returns its exit code."""
    url = url or os.environ.get("HOLDFAST_URL")
    try:
        if not url:
            url = "local://"
            output.say(_LOCAL)
        with connect(url, **options) as client:
            return act(client) or 0
    except (InvalidName, InvalidConfig) as error:
        raise click.UsageError(str(error), ctx) from error
    except HoldfastError as error:
        output.say(str(error))
        return UNAVAILABLE if isinstance(error, Unavailable) else USAGE if isinstance(error, Unsupported) else NOTHING
    except BrokenPipeError:  # the reader of stdout, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at exit
        return 0
