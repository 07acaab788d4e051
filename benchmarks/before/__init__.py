"""Is this tree slower than an earlier revision? Both run the same work in turn, in one run, on one server.

    python -m benchmarks.before REVISION [--rounds 15] [--seconds 0.5] [--only NAME]

Three teams of processes take turns in every round, in random order: this tree, the earlier revision, and the earlier
revision once more. Only the public interface is used, so both trees can run the same work. The result is the ratio
within a round. The third team is the control: the spread of earlier/earlier shows the noise of the machine. A figure
passes if the median of new/old is at least the lower end of that spread, or at least 0.97. The table also shows the CPU
time of the clients per cycle, which other work on the machine disturbs less.

Each team has its own namespace, so it finds only keys of its own tree on the server. If teams shared keys, a tree with
another format would find the yield state of the other tree, and get longer yield windows.
"""
