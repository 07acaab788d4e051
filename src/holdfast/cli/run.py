"""``holdfast run NAME... -- COMMAND``: its options, its help, and what is wrong with how it was called."""

from __future__ import annotations

import os
from typing import Final

import click

from holdfast.blocking import connect
from holdfast.cli import Voice, duration
from holdfast.cli.streams import unblocked_stderr
from holdfast.cli.supervise import Run
from holdfast.errors import InvalidConfig, InvalidName
from holdfast.options import LONGEST_LABEL

__all__ = ["run"]

SHORTEST_TTL: Final = 0.1  # below that, a scheduler's whim would cost the lock


class RunCommand(click.Command):
    """A command with a command in it, which begins after ``--``."""

    sections: Final = {
        "Taking the lock": ("wait", "url", "pass_url", "label"),
        "Keeping it": ("ttl", "at_least", "max_hold"),
        "Output": (),  # all the others
    }

    examples: Final = (
        (
            "cron, on several machines whose clocks differ: one does it, the others skip it",
            "0 3 * * *  holdfast run --quiet --wait 0 --at-least 5m backup -- backup.sh",
        ),
        (
            "one deployment at a time; give up after ten minutes, and end one that takes an hour",
            "holdfast run --wait 10m --max-hold 1h deploy:web -- ./deploy.sh",
        ),
        (
            "two locks, and a fence for what is written",
            "holdfast run users orders -- sh -c './migrate --fence \"$HOLDFAST_FENCE\"'",
        ),
    )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        split = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:split])
        ctx.meta["holdfast.argv"] = args[split + 1 :]
        if not args[split + 1 :] and not ctx.resilient_parsing:
            raise click.UsageError("what is to be run? Write it after '--': holdfast run NAME -- COMMAND", ctx)
        if args[split + 1 :] and not args[split + 1]:
            raise click.UsageError("the command after '--' is empty; a variable in its place may not be set", ctx)
        return rest

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] NAME... -- COMMAND [ARG]...")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {param.name: param.get_help_record(ctx) for param in options}
        for title, names in self.sections.items():
            rows = [records.pop(name) for name in names] if names else list(records.values())
            with formatter.section(click.style(title, bold=True)):
                formatter.write_dl([row for row in rows if row is not None])
        with formatter.section(click.style("Exit codes", bold=True)):
            formatter.write_dl(
                [
                    ("COMMAND's own", "128 + N if signal N ended it, 127 if it was not found, 126 if it cannot be run"),
                    ("75", "busy: the lock was not to be had within --wait"),
                    ("76", "lost: the lock was lost or --max-hold reached, and COMMAND was ended"),
                    ("69", "unavailable: no server could be used"),
                    ("64", "usage: an option, a name or a URL is wrong"),
                ]
            )
        with formatter.section(click.style("COMMAND's environment", bold=True)):
            formatter.write_dl(
                [
                    ("HOLDFAST_NAME", "the name, or the names with a space between"),
                    ("HOLDFAST_FENCE", "a number that is greater for every later holder: the largest, of several"),
                    ("HOLDFAST_FENCES", "with several names, the fence of each, as JSON"),
                    ("HOLDFAST_HOLDER", "who writes with that fence, for holdfast.guard.Stamp(name, fence, holder)"),
                    ("HOLDFAST_URL", "with --pass-url only: a COMMAND that itself uses Holdfast needs it"),
                ]
            )
        with formatter.section(click.style("Examples", bold=True)):
            for remark, line in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{click.style('# ' + remark, dim=True)}\n")
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


@click.command(
    cls=RunCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    short_help="Run a command while holding a lock.",
)
@click.argument("names", metavar="NAME", nargs=-1, required=True)
@click.option(
    "--wait",
    callback=duration(),
    metavar="DURATION",
    help="How long to wait for it; 0 tries once.  [default: for ever]",
)
@click.option("--url", metavar="URL", help="The server.  [default: HOLDFAST_URL, else local://, which is this machine]")
@click.option("--pass-url", is_flag=True, help="Let COMMAND see that URL, password and all, in HOLDFAST_URL.")
@click.option(
    "--label", metavar="TEXT", help="A word for people who look at who holds what.  [default: COMMAND's name]"
)
@click.option(
    "--ttl",
    callback=duration(SHORTEST_TTL),
    metavar="DURATION",
    default="30",
    help="When the lock is free again should this machine fall silent; renewed until then.  [default: 30]",
)
@click.option(
    "--at-least",
    callback=duration(),
    metavar="DURATION",
    default="0",
    help="Keep the lock at least so long, even if COMMAND ends sooner. For cron jobs on clocks that differ.",
)
@click.option(
    "--max-hold",
    callback=duration(SHORTEST_TTL),
    metavar="DURATION",
    help="End COMMAND after so long: SIGTERM, and SIGKILL soon after.",
)
@click.option("--json", "as_json", is_flag=True, help="Say what happens on stderr, as one JSON object per line.")
@click.option("--quiet", "-q", is_flag=True, help="Say nothing but errors. That the lock is busy is not one.")
@click.pass_context
def run(
    ctx: click.Context,
    *,
    names: tuple[str, ...],
    wait: float | None,
    url: str | None,
    pass_url: bool,
    label: str | None,
    ttl: float,
    at_least: float,
    max_hold: float | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Run COMMAND while holding the lock NAME, and give it back when COMMAND ends.

    Of all who ask the same server for the same NAME, one at a time runs. Signals are passed on to COMMAND. Should the
    lock be lost, COMMAND is ended before anybody else can have it; should holdfast itself be killed, COMMAND is
    killed too. Several NAMEs are one lock: all of them or none, and none is held while another is waited for.

    DURATION is in seconds, or has a unit: 250ms, 90s, 5m, 1h.
    """
    argv: list[str] = ctx.meta["holdfast.argv"]
    if max_hold is not None and at_least > max_hold:
        raise click.UsageError("--at-least is longer than --max-hold; make it shorter", ctx)
    voice = Voice(as_json=as_json, quiet=quiet)
    url = url or os.environ.get("HOLDFAST_URL")
    with unblocked_stderr() as start_writing:
        if not url:
            url = "local://"
            voice.say(
                "local",
                "no server was named, so locks reach no further than this machine (local://); "
                "name one with --url or HOLDFAST_URL",
            )
        try:
            return Run(
                connect(url),
                sorted(names),
                argv,
                voice,
                wait=wait,
                ttl=ttl,
                at_least=at_least,
                max_hold=max_hold,
                environment={"HOLDFAST_URL": url if pass_url else None},
                label=os.path.basename(argv[0])[:LONGEST_LABEL] if label is None else label,
            ).run(when_forked=start_writing)
        except (InvalidName, InvalidConfig) as error:
            raise click.UsageError(str(error), ctx) from error
