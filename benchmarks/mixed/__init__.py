"""How often other lock libraries get a lock that busy Holdfast processes use too: ``make bench-mixed``.

    python -m benchmarks.mixed [--seconds 10] [--only LIBRARY] [--node-modules FOLDER] [--json FILE]

Two Holdfast processes want one lock, hold it for 5 ms and ask again at once. Two processes of another library, at its
default settings, join them and do the same. Waits and grants are counted from the first grant of that library, because
Holdfast cannot know of the library before that; a separate column shows how long the first grant took. Just before, the
two Holdfast processes run without peers, and their grants are compared with that run.

The key is the one that the peer makes of its name (``redlock:x``, ``lock:x``, ``mutex:x`` or ``x``); Holdfast locks
that key. Each holder increments a counter on the server and must read 1, and decrements it before it releases, so two
holders at once are counted, whatever language they are written in.

    worker.py, worker.js   one process: prints a line when it asks, holds, has left or has failed
    __main__               runs the processes, reads the lines, prints the table
"""
