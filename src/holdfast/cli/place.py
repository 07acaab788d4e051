"""What a URL leads to, for operators: one node of a cluster, or an embedded server, and whose it is.

Neither threatens a lock, and both mislead an operator who does not know it: a node lists its own locks only, and
``local://`` may be served by the program of another project of the same user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.blocking import Client
from holdfast.errors import HoldfastError
from holdfast.protocol.effects import Command, StepFailed
from holdfast.url import url_of_fleet

Ask = Callable[..., Any]  # the reply of the server to a command

_TIMEOUT: Final = 1.0
_SINGLE: Final = ("redis", "rediss", "valkey", "valkeys", "unix")  # schemes
LOCAL: Final = "local"


def note_on(client: Client) -> str:
    """What an operator has to know about the place of this client; empty if it is what the URL says."""
    engine = client._driver.engine
    scheme = engine.address.partition("://")[0]

    def ask(*words: str) -> Any:
        return engine.call(Command(words), _TIMEOUT)

    try:
        if scheme == LOCAL:
            return f"these locks are on {embedded(ask)}"
        if scheme in _SINGLE and (url := cluster_of(engine.address, ask)):
            return f"{engine.address} is one node of a cluster, and locks on its other nodes are not seen: use {url}"
    except (StepFailed, HoldfastError):
        pass  # it does not say
    return ""


def cluster_of(address: str, ask: Ask) -> str:
    """The URL of the cluster of which the server at this address is a node; empty if it is a server by itself."""
    fields = ask("HELLO")  # needs no permission
    known = isinstance(fields, list) and b"mode" in fields[:-1]
    return url_of_fleet("cluster", address) if known and fields[fields.index(b"mode") + 1] == b"cluster" else ""


def embedded(ask: Ask) -> str:
    """The directory of an embedded server, its process, and its program: the path shows whose installation it is."""
    _, directory = ask("CONFIG", "GET", "dir")
    lines = ask("INFO", "server").decode(errors="replace").splitlines()
    info = dict(line.split(":", 1) for line in lines if ":" in line)
    place = directory.decode(errors="replace")
    return f"the embedded server in {place} (pid {info['process_id']}, {info['executable']})"
