"""The commands of the lab's store, one module per type of value: all commands that Holdfast's locks and tests use.

Importing a module adds its commands to the table.
"""

from holdfast.lab.servers.commands import connection, hashes, keys, lists, scripts, server, sorted_sets, strings
from holdfast.lab.servers.commands.table import COMMANDS, Command, look_up

__all__ = ["COMMANDS", "Command", "look_up"]
_ENTERED = (connection, hashes, keys, lists, scripts, server, sorted_sets, strings)
