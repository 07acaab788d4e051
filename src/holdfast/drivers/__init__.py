"""Drivers run protocols: with threads, or with asyncio."""
