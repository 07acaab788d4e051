"""Commands for operators: see the locks of a server, explain a lock that is stuck, and free it."""
