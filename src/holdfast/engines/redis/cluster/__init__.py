"""The engines for a cluster: the engine of a single server for each of its nodes, and a map from slots to nodes."""
