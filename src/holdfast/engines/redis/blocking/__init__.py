"""The engine for threads: pooled connections for steps, and one shared connection with a thread of its own."""
