"""Is this tree slower than an earlier revision? Both run the same work in turn, in one run, on one server.

    python -m benchmarks.before REVISION [--rounds 15] [--seconds 0.5] [--only NAME]

Three teams of processes take turns in every round, in random order: this tree, the earlier revision, and the earlier
revision once more. Only the public interface is used, so both trees can run the same work. What counts is the ratio
within a round. The third team is the control: the spread of earlier/earlier is what the noise of the machine does.
A figure is kept if the median of new/old is at least the lower end of that spread, or at least 0.97. Beside it stands
the CPU time of the clients per cycle, which other work on the machine disturbs less.

Each team has a namespace, so that it finds on the server only what its own tree has left there. With keys in common, a
tree that writes another format than the one before it also finds older yield state, and so longer yield windows.
"""
