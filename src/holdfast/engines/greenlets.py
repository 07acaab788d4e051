"""gevent, whose monkey patching makes greenlets of threads; and eventlet, which is refused.

After ``gevent.monkey.patch_all()`` locks, queues, sockets, ``select.poll`` and threads are gevent's. They are looked up
in their modules when they are used, so holdfast may be imported before or after the patching, but a client must be made
after it. Two things differ all the same. Each recv() of a socket without a timeout waits, also with MSG_DONTWAIT, so
reads have a timeout there. And greenlets, unlike threads, go on in a forked child.
"""

from __future__ import annotations

import select
import sys
import threading
from typing import Any, NamedTuple

from holdfast.errors import InvalidConfig

__all__ = ["Mark", "mark", "native_poll", "refuse_eventlet"]


def native_poll() -> Any:
    """The system's select.poll, which looks at a socket without letting other greenlets run."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey.get_original("select", "poll")() if monkey is not None else select.poll()


class Mark(NamedTuple):
    """A thread of ours that is a greenlet."""

    thread: threading.Thread
    greenlet: Any

    def end(self) -> None:
        """In a forked child: let it not go on here, once all that is to be done after a fork is done."""
        self.greenlet.parent.loop.run_callback(self._end)

    def _end(self) -> None:
        threading._active[self.thread.ident] = self.thread  # type: ignore[attr-defined] # it takes itself out
        self.greenlet.throw(SystemExit)


def mark() -> list[Mark]:
    """The thread that runs, if threads are greenlets; else nothing."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("threading"):
        return []
    return [Mark(threading.current_thread(), sys.modules["gevent"].getcurrent())]


def refuse_eventlet() -> None:
    """InvalidConfig if eventlet has patched sockets or threads."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and any(map(patcher.is_monkey_patched, ("socket", "thread", "select"))):
        raise InvalidConfig("connect() under eventlet", "eventlet is not supported; use gevent or threads")
