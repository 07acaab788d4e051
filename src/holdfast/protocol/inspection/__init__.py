"""What operators do with locks: see who holds and waits, end a hold, read what was broken."""
