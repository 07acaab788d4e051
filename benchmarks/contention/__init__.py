"""What a lock costs that many want at once, beside other libraries: ``make bench-contention``.

    python -m benchmarks.contention [--rounds 5] [--window 1.2] [--only KEY] [--quick] [--docs FOLDER] [--json FILE]

How it is made fair. All talk TCP over loopback to one real server, and make a lock object anew for every acquisition,
from one client per process that its threads or tasks share, as their own documentation advises, with hiredis. A peer
that polls runs at its defaults, and again as fast as polling does it good: the settings in ``contenders`` all run
in a trial, and the best of them goes on beside the defaults. Whichever of the two gets more done is the peer; the
best of the peers is what Holdfast is compared with. Acquisitions are counted, also those by the participant that has
just released, which is how locks that poll get most of theirs; and changes of owner, which are those by another one.

Near and far. Loopback takes no time, which flatters locks that ask often. So some contests are run again through a
``relay``, the same for all, that passes every chunk on after 0.5 ms, in both directions.

How it is made steady. A machine's speed can change by a factor of three within seconds. So all contenders run in every
round, in an order that is shuffled each time, and what counts is the median over the rounds of the ratio within a
round. Everybody is asking before the window opens, and goes on asking until it is shut.

Where things run. An event loop and the server have a core each, where the system allows it: neither can use more, and
a kernel that puts both on one, and changes its mind within seconds, would be all that is measured. Threads and
processes are left to the kernel, and so is the server beside them; to pin them costs redis-py a fifth of its speed.

What is counted. A wait is the time from asking to having; one that has not ended when the window shuts counts as long
as it has lasted. Requests are what clients sent, as MONITOR shows it, not what scripts called; MONITOR slows the
server, so they are counted in a run of their own. Whoever holds a lock writes its number into memory that all share,
and looks whether it is still there when it leaves: ``ground``.

    contenders   the libraries, and how each is used
    ground       the memory that the locks guard, which shows two holders at once
    workers      one process of participants
    relay        a link that takes time
    field        one run: processes, a window of time, what came of it
    monitor      what MONITOR says: requests, and who asked first
    contest      one setting, all contenders, round after round
    scenarios    what is run, and what is promised of it
    page         the report, as Markdown; picture, as SVG
"""
