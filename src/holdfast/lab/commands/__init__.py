"""The commands that the lab's store knows, by the type of what they work on."""

from __future__ import annotations

from holdfast.lab.commands import (  # Importing a module enters its commands in the table.
    connection,
    hashes,
    keys,
    lists,
    scripts,
    server,
    sets,
    sorted_sets,
    strings,
)
from holdfast.lab.commands.table import COMMANDS, Command, look_up

__all__ = [
    "COMMANDS",
    "Command",
    "connection",
    "hashes",
    "keys",
    "lists",
    "look_up",
    "scripts",
    "server",
    "sets",
    "sorted_sets",
    "strings",
]
