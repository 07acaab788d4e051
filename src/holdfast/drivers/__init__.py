"""How a protocol is run: with threads, or with asyncio."""
