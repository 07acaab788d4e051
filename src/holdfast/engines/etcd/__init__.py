"""The engine for etcd: runs the programs of protocol/intents over etcd's JSON gateway."""
