"""Locks on etcd: a queue of intents for each name. The steps of all kinds, as requests to etcd."""
