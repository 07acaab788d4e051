"""The cost of a contended lock, compared with other libraries: ``make bench-contention``.

    python -m benchmarks.contention [--rounds 5] [--window 1.2] [--only KEY] [--quick] [--docs FOLDER] [--json FILE]

Fairness of the comparison. All libraries use TCP over loopback to one real server, with hiredis. Each process has one
client that its threads or tasks share, as the documentation of each library advises, and makes a new lock object for
every acquisition. A library that polls runs with its defaults and with faster polling: all settings in ``contenders``
run in a trial, and the best of them runs in the rounds, together with the defaults. The setting with more acquisitions
represents the library; Holdfast is compared with the best library. Two things are counted. Acquisitions include those
by the participant that has just released the lock (most acquisitions of polling locks are of this kind). Changes of
owner are acquisitions by another participant than the last one.

Near and far. Loopback takes no time, which favours locks that ask often. So some contests run again through a
``relay``, the same for all libraries, that forwards every chunk after 0.5 ms in both directions.

Noise. The speed of a machine can change by a factor of three within seconds. So all contenders run in every round, in
an order that is shuffled each time. The result is the median over the rounds of the ratio within a round. All
participants ask before the window opens, and continue until it closes.

Cores. Where the system allows it, an event loop and the server have a core each. Neither can use more than one. A
kernel that sometimes puts both on one core would otherwise decide the result. Threads, processes, and the server beside
them run where the kernel puts them; pinning them would cost redis-py a fifth of its speed.

What is counted. A wait is the time from the request to the grant. If a wait has not ended when the window closes, its
length so far counts. Requests are what clients sent, as MONITOR shows it, without what scripts called; MONITOR
slows the server, so requests are counted in a separate run. Each holder writes its number into shared memory, and
checks before it leaves that the number is still there: ``ground``.

    contenders   the libraries, and how each is used
    ground       the memory that the locks guard; it shows two holders at once
    workers      one process of participants
    relay        a link with a delay
    field        one run: processes, a window of time, the outcome
    monitor      the output of MONITOR: requests, and their order
    contest      one setting, all contenders, round after round
    scenarios    what is run, and what is promised
    page         the report as Markdown; picture: as SVG
"""
