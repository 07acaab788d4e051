"""``holdfast break`` and ``holdfast history``."""

from __future__ import annotations

import getpass
import os
import shlex
import sys
from typing import Final

import click

from holdfast.blocking import Client
from holdfast.cli.operate.common import NOTHING, Output, operator_command
from holdfast.cli.operate.endings import suggest_broken, suggest_in_use, whole_key
from holdfast.cli.operate.tables import details, history_table, named
from holdfast.holder import Holder, LockInfo
from holdfast.untrusted import MOST_CHARACTERS

_RISK: Final = (
    "Its work is not stopped: it learns of the loss, and may go on until then. Stop that process first if you can."
)
_RISK_OF_FOREIGN: Final = (
    "It may not learn of that. If the key is not a lock but the data of a program, these data are deleted."
)


@operator_command(short_help="Free a lock whose holder is stuck.")
@click.argument("name")
@click.option("--reason", metavar="TEXT", help="Why. The holder and the history get it.  [required]")
@click.option("--fence", type=int, metavar="N", help="Only the holder with this fence; see holdfast who.")
@click.option("--id", "holder_id", metavar="ID", help="Only the holder with this id, for one without a fence.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def break_(
    client: Client,
    output: Output,
    *,
    name: str,
    reason: str | None,
    fence: int | None,
    holder_id: str | None,
    yes: bool,
) -> int:
    """Free the lock NAME from the holder that has it now, and give it to the next waiter.

    Shows who would lose the lock and asks. Only that holder loses it: if another one has the lock by then, nothing is
    changed. The holder's lease is lost with your reason, its fence is lower than all later ones, and the history of the
    lock has an entry.
    """
    info = client.inspect(name, limit=100_000)
    holder = None if info is None else _chosen(info, fence, holder_id)
    if info is None or holder is None:
        now = (
            f". Its holder is {named(info.holders[0])}, fence {info.holders[0].fence}" if info and info.holders else ""
        )
        output.say(
            f"lock {whole_key(client, name)!r} is not held{_which(fence, holder_id)}: there is nothing to break{now}"
        )
        if not now:
            suggest_in_use(client, output, name, "holdfast break {} --reason TEXT", held=True)
        return NOTHING
    asks = not yes and sys.stdin.isatty()
    if not yes and not asks:
        why = "" if reason else " and --reason TEXT"
        raise click.UsageError(f"say --yes{why}: there is no terminal on which to ask")
    if not yes or not output.as_json:
        console = output.console()
        console.file = sys.stderr
        console.print(details(info, console.width))
    if not reason and not asks:
        raise click.UsageError("say why with --reason: the holder and the history get it")
    if asks:
        click.echo(f"{named(holder)} loses the lock. {_RISK if holder.host else _RISK_OF_FOREIGN}", err=True)
        reason = reason or click.prompt("Reason", err=True)
        if not click.confirm("Break it?", err=True):
            output.say("nothing was changed")
            return NOTHING
    broken = client.break_lock(name, fence=holder.fence, holder_id=holder.id, reason=reason or "", label=_operator())
    if output.as_json:
        output.json(broken.as_json())
    else:
        output.say(
            f"lock {broken.key!r} was taken from {named(broken.holder)}; see holdfast history {shlex.quote(name)}"
        )
    return 0


def _chosen(info: LockInfo, fence: int | None, holder_id: str | None) -> Holder | None:
    holders = [holder for holder in info.holders if fence in (None, holder.fence) and holder_id in (None, holder.id)]
    if len(holders) > 1:
        which = "; ".join(f"--fence {holder.fence} is {named(holder)}" for holder in holders[:5])
        raise click.UsageError(f"{info.key!r} has {len(holders)} holders: say which one loses it. {which}")
    return holders[0] if holders else None


def _which(fence: int | None, holder_id: str | None) -> str:
    return f" with fence {fence}" if fence is not None else f" with id {holder_id}" if holder_id is not None else ""


def _operator() -> str:
    """The user, as far as it is known; behind sudo the one who called it."""
    try:
        return (os.environ.get("SUDO_USER") or getpass.getuser())[:MOST_CHARACTERS]
    except (OSError, KeyError):
        return ""


@operator_command(short_help="Show when a lock was broken, by whom, and why.")
@click.argument("name")
def history(client: Client, output: Output, *, name: str) -> int:
    """Show when the lock NAME was broken, by whom, and why: the latest 100 times within 30 days."""
    entries = client.history(name)
    if output.as_json:
        output.json([entry.as_json() for entry in entries])
    elif entries:
        console = output.console()
        console.print(history_table(entries, console))
    if not entries:
        output.say(f"lock {whole_key(client, name)!r} was not broken in the last 30 days")
        suggest_broken(client, output, name, "holdfast history {}")
    return 0
