"""What other lock libraries get beside busy Holdfast processes, on the same key: ``make bench-mixed``.

    python -m benchmarks.mixed [--seconds 10] [--only LIBRARY] [--node-modules FOLDER] [--json FILE]

Two Holdfast processes want one lock, hold it for 5 ms and ask again at once. Two processes of another library, at its
default settings, join them and do the same. Waits and grants are counted from the first grant of that library, because
before that Holdfast cannot know of it; how long the first grant took is a column of its own. Just before, the two
Holdfast processes run without peers, and their grants are compared with that run.

The key is the one that the peer makes of its name (``redlock:x``, ``lock:x``, ``mutex:x`` or ``x``); Holdfast locks
that key. Each holder increments a counter on the server and must read 1, and decrements it before it releases, so two
holders at once are counted, whatever language they are written in.

    worker.py, worker.js   one process: prints a line when it asks, holds, has left or has failed
    __main__               runs the processes, reads the lines, prints the table
"""
