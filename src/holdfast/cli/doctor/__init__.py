"""``holdfast doctor``: what threatens locks on a server."""
