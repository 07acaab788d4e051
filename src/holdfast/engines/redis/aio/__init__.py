"""The engine for asyncio: one connection for all tasks, and dedicated ones for commands that need them."""
