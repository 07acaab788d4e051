"""Waiting for a lock: in the local queue of a process, then in the queue on the server."""
