"""The algorithms, as generators of effects: no socket, no clock, no thread, no random source."""
