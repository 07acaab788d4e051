"""The subjects of searches: each kind of lock, the programs of its clients, and the bounds of its search."""
