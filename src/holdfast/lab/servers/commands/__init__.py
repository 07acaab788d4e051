"""The commands that the lab's store knows, by the type of what they work on: all that Holdfast's locks and tests use.

Importing a module enters its commands in the table.
"""

from holdfast.lab.servers.commands import connection, hashes, keys, lists, scripts, server, sorted_sets, strings
from holdfast.lab.servers.commands.table import COMMANDS, Command, look_up

__all__ = ["COMMANDS", "Command", "look_up"]
_ENTERED = (connection, hashes, keys, lists, scripts, server, sorted_sets, strings)
