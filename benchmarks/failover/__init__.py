"""Failovers and reshardings under load: Holdfast and redis-py's Lock, on the same servers at the same time.

    python -m benchmarks.failover [--failovers 50] [--reshardings 20] [--only sentinel|cluster|reshard]

Eight processes of each library contend for one lock per library, and write to a resource that remembers fences. The
servers replicate asynchronously, so a failover can lose a grant: two processes then hold the lock. The benchmark counts
such overlaps. A lock library must guarantee two things here: fences never go back, so the resource refuses the holder
whose grant was lost; and work continues soon.
"""
