"""``holdfast run NAME... -- COMMAND``: options, help, and usage errors."""

from __future__ import annotations

import os
from typing import Final

import click

from holdfast.blocking import connect
from holdfast.cli import BUSY, URL_HELP, Voice, duration
from holdfast.cli.streams import unblocked_stderr
from holdfast.cli.supervise import Run
from holdfast.errors import InvalidConfig, InvalidName, Unsupported
from holdfast.untrusted import MOST_CHARACTERS

SHORTEST_TTL: Final = 0.1  # with a shorter one, an ordinary scheduling delay would lose the lock


class RunCommand(click.Command):
    """A command that takes another command after ``--``."""

    sections: Final = {
        "Taking the lock": ("wait", "busy_code", "shared", "exclusive", "permits", "url", "pass_url", "label"),
        "Keeping it": ("ttl", "at_least", "max_hold"),
        "Output": (),  # all the others
    }

    examples: Final = (
        (
            "cron, on several machines whose clocks differ: one runs the backup, the others skip it",
            "0 3 * * *  holdfast run --quiet --wait 0 --at-least 5m backup -- backup.sh",
        ),
        (
            "one deployment at a time; wait ten minutes at most, and end a deployment after an hour",
            "holdfast run --wait 10m --max-hold 1h deploy:web -- ./deploy.sh",
        ),
        (
            "two names, and a fence for guarded writes",
            "holdfast run users orders -- sh -c './migrate --fence \"$HOLDFAST_FENCE\"'",
        ),
    )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        split = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:split])
        ctx.meta["holdfast.argv"] = args[split + 1 :]
        if not args[split + 1 :] and not ctx.resilient_parsing:
            raise click.UsageError("no command was given; write it after '--': holdfast run NAME -- COMMAND", ctx)
        if args[split + 1 :] and not args[split + 1]:
            raise click.UsageError("the command after '--' is empty; check that its variable is set", ctx)
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
                    ("75", "busy: the lock was not acquired within --wait; --busy-code changes it"),
                    ("76", "lost: the lock was lost or --max-hold was over, and COMMAND was ended"),
                    ("69", "unavailable: no server could be used"),
                    ("64", "usage: an option, a name or a URL is wrong"),
                ]
            )
        with formatter.section(click.style("COMMAND's environment", bold=True)):
            formatter.write_dl(
                [
                    ("HOLDFAST_NAME", "the name, or all names separated by spaces"),
                    ("HOLDFAST_FENCE", "a number that grows with each holder; with several names, the largest fence"),
                    ("HOLDFAST_FENCES", "with several names, the fence of each name, as JSON"),
                    ("HOLDFAST_HOLDER", "the holder, for holdfast.guard.Stamp(name, fence, holder)"),
                    ("HOLDFAST_URL", "the URL, only with --pass-url, for a COMMAND that itself uses Holdfast"),
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
    help="How long to wait for the lock; 0 tries once.  [default: forever]",
)
@click.option(
    "--busy-code",
    type=click.IntRange(0, 255),
    metavar="N",
    default=BUSY,
    help="The exit code if the lock was not acquired within --wait.  [default: 75]",
)
@click.option("--shared", is_flag=True, help="Take the read side of a readers-writer lock: many at a time.")
@click.option("--exclusive", is_flag=True, help="Take its write side: alone, also against --shared.")
@click.option("--permits", type=click.IntRange(1), metavar="N", help="Let N run at a time: a semaphore.")
@click.option("--url", metavar="URL", help=URL_HELP)
@click.option("--pass-url", is_flag=True, help="Pass the URL, with its password, to COMMAND as HOLDFAST_URL.")
@click.option("--label", metavar="TEXT", help="A text that identifies the holder.  [default: COMMAND's name]")
@click.option(
    "--ttl",
    callback=duration(SHORTEST_TTL),
    metavar="DURATION",
    default="30",
    help="The lock is free after this time if it is no longer renewed.  [default: 30]",
)
@click.option(
    "--at-least",
    callback=duration(),
    metavar="DURATION",
    default="0",
    help="Leave the lock taken for at least this long, also if COMMAND ends sooner; for clocks that differ."
    " Not on etcd and memcached.",
)
@click.option(
    "--max-hold",
    callback=duration(SHORTEST_TTL),
    metavar="DURATION",
    help="End COMMAND after this time: SIGTERM, and SIGKILL a third of the ttl later (at most 10 s).",
)
@click.option("--json", "as_json", is_flag=True, help="Write events to stderr, one JSON object per line.")
@click.option("--quiet", "-q", is_flag=True, help="Write only errors. A busy lock is not an error.")
@click.pass_context
def run(
    ctx: click.Context,
    *,
    names: tuple[str, ...],
    wait: float | None,
    busy_code: int,
    shared: bool,
    exclusive: bool,
    permits: int | None,
    url: str | None,
    pass_url: bool,
    label: str | None,
    ttl: float,
    at_least: float,
    max_hold: float | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Run COMMAND while holding the lock NAME, and release the lock when COMMAND ends.

    Clients that use the same server and NAME run one at a time. Signals are passed on to COMMAND. If the lock cannot be
    renewed, COMMAND is ended before another client can acquire it; if it is lost, at once. If holdfast itself is
    killed, COMMAND is killed too. Several NAMEs are one lock: all of them are acquired, or none.

    DURATION is in seconds, or has a unit: 250ms, 90s, 5m, 1h, 1d.
    """
    argv: list[str] = ctx.meta["holdfast.argv"]
    if max_hold is not None and at_least > max_hold:
        raise click.UsageError("--at-least is longer than --max-hold; make it shorter", ctx)
    side = "read" if shared else "write" if exclusive else ""
    if shared + exclusive + (permits is not None) > 1:
        raise click.UsageError("--shared, --exclusive and --permits exclude each other; choose one", ctx)
    if len(names) > 1 and (side or permits is not None):
        raise click.UsageError("--shared, --exclusive and --permits take one NAME", ctx)
    voice = Voice(as_json=as_json, quiet=quiet)
    url = url or os.environ.get("HOLDFAST_URL")
    with unblocked_stderr() as start_writing:
        if not url:
            url = "local://"
            voice.say(
                "local",
                "no server was named, so locks only work on this machine (local://); "
                "name a server with --url or HOLDFAST_URL",
            )
        try:
            client = connect(url, outage_wait=None)  # it waits as long as --wait says, also for a server
            if at_least:
                client._driver.require("holdfast run --at-least")
            return Run(
                client,
                sorted(names),
                argv,
                voice,
                wait=wait,
                ttl=ttl,
                at_least=at_least,
                max_hold=max_hold,
                environment={"HOLDFAST_URL": url if pass_url else None},
                label=_label_of(argv[0]) if label is None else label,
                side=side,
                permits=permits,
                busy_code=busy_code,
            ).run(when_forked=start_writing)
        except (InvalidName, InvalidConfig, Unsupported) as error:
            raise click.UsageError(str(error), ctx) from error


def _label_of(command: str) -> str:
    """The name of the command. Bytes of it that are no text are replaced, and what is too long for a label is cut."""
    return os.fsencode(os.path.basename(command)).decode(errors="replace")[:MOST_CHARACTERS]
