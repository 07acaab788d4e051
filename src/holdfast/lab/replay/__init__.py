"""A trace performed on a real server."""
