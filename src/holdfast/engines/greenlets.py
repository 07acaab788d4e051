"""Support for gevent, which turns threads into greenlets; and the refusal of eventlet.

After ``gevent.monkey.patch_all()`` locks, queues, sockets, ``select.poll`` and threads are gevent's. Holdfast looks
them up when it uses them. So Holdfast may be imported before or after the patching, but a client must be made after it.

Two differences remain. Under gevent, recv() on a socket without a timeout always waits, even with MSG_DONTWAIT, so
reads use a timeout there. And greenlets, unlike threads, continue to run in a forked child.
"""

from __future__ import annotations

import select
import sys
import threading
from typing import Any, NamedTuple

from holdfast.errors import InvalidConfig


def native_poll() -> Any:
    """The system's select.poll object, which checks a socket without switching to another greenlet."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey.get_original("select", "poll")() if monkey is not None else select.poll()


class Mark(NamedTuple):
    """A background thread of Holdfast that is a greenlet."""

    thread: threading.Thread
    greenlet: Any

    def end(self) -> None:
        """In a forked child: end the greenlet, after all fork handlers have run."""
        self.greenlet.parent.loop.run_callback(self._end)

    def _end(self) -> None:
        threading._active[self.thread.ident] = self.thread  # type: ignore[attr-defined] # the thread removes this entry when it ends
        self.greenlet.throw(SystemExit)


def mark() -> list[Mark]:
    """A list with the current thread if threads are greenlets, else an empty list."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("threading"):
        return []
    return [Mark(threading.current_thread(), sys.modules["gevent"].getcurrent())]


def refuse_eventlet() -> None:
    """Raise InvalidConfig if eventlet has patched sockets or threads."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and any(map(patcher.is_monkey_patched, ("socket", "thread", "select"))):
        raise InvalidConfig("connect() under eventlet", "eventlet is not supported; use gevent or threads")
