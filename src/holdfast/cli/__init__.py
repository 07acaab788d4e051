"""``holdfast`` on the command line.

Each command is imported when it is called, so that it does not load what only another command needs. Exit codes are
those of sysexits.h. ``holdfast run`` also returns the exit codes of its command, and scripts must be able to tell both
apart; many commands exit with 2, which is click's code for a wrong option.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

import click

from holdfast import __version__
from holdfast.cli.streams import open_missing_streams, unblocked_stderr
from holdfast.errors import InvalidConfig
from holdfast.options import seconds
from holdfast.untrusted import printable

USAGE: Final = 64
UNAVAILABLE: Final = 69
BUSY: Final = 75
LOST: Final = 76
INTERRUPTED: Final = 130

URL_HELP: Final = (
    "The server; local:///DIR is an embedded one in a directory of yours.  "
    "[default: HOLDFAST_URL, else local://, that of your user on this machine]"
)

_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?(ms|[smhd]|)")


class Commands(click.Group):
    """A group of commands, each in a module of its own."""

    sections: Final = {
        "Use a lock": {"run": "run"},
        "A lock is stuck": {
            "ls": "operate.listing",
            "who": "operate.listing",
            "break": "operate.breaking",
            "history": "operate.breaking",
            "watch": "operate.watching",
            "top": "operate.top",
        },
        "Check": {"doctor": "doctor.command", "lab": "lab"},
    }
    homes: Final = {name: home for commands in sections.values() for name, home in commands.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.homes)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self.sections.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(click.style(title, bold=True)):
                formatter.write_dl([(name, one.get_short_help_str(80)) for name, one in found if one is not None])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = self.homes.get(cmd_name)
        if home is None:
            return None
        module = import_module(f"holdfast.cli.{home}")
        command: click.Command = getattr(module, cmd_name, None) or getattr(module, f"{cmd_name}_")
        return command

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        open_missing_streams()
        try:
            code = super().main(args, prog_name or "holdfast", complete_var, standalone_mode=False, **extra)
            if not (sys.argv[1:] if args is None else args):
                code = USAGE  # click before 8.2 shows the help, and ends with 0
        except click.ClickException as error:
            message = io.StringIO()
            error.show(message)
            with unblocked_stderr():
                click.echo(printable(message.getvalue(), keep="\n"), nl=False, err=True)
            code = USAGE if isinstance(error, click.UsageError) else error.exit_code
        except (click.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        sys.exit(code if isinstance(code, int) else 0)


class Voice:
    """Writes events to stderr, each as a line of text or as a JSON object."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._as_json = as_json
        self._quiet = quiet

    def say(self, event: str, message: str = "", *, error: bool = False, **facts: Any) -> None:
        if self._quiet and not error:
            return
        if self._as_json:
            more = {"message": message} if error else {}
            line = json.dumps({"event": event, **facts, **more}).replace("\x7f", "\\u007f")
        elif message:
            line = "holdfast: " + printable(message.replace("\n", " "))
        else:
            return
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except OSError:
            pass  # nothing reads stderr; for ``holdfast run``, streams.py handles that


def parse_duration(text: str) -> float:
    """Seconds, from ``90``, ``1.5``, ``250ms``, ``90s``, ``5m``, ``1h`` or ``1d``."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a duration: write seconds, or a number with ms, s, m, h or d, such as 5m")
    return float(match[1]) * _UNITS[match[2]]


def duration(least: float = 0.0) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """A callback for an option that takes a duration."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        try:
            return seconds(value, parse_duration(value), least=least)
        except InvalidConfig as error:
            raise click.BadParameter(f"{value!r}: {error.problem}", ctx, param) from None
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return convert


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="holdfast %(version)s")
def main() -> None:
    """Distributed locks from the shell.

    Name a server with --url, after the command, or with HOLDFAST_URL. Without one, locks only work between processes
    of this machine: local:// is an embedded server, which all programs of your user share. local:///DIR is one in a
    directory of yours, such as local:///tmp/my-tests, which only programs that name DIR share.

    If your programs connect with a namespace, put it into the URL: redis://host:6379/0?namespace=shop%3A

    A lock is stuck? 'holdfast ls' finds it, 'holdfast who NAME' explains it, 'holdfast break NAME' frees it.
    """
