"""What operators do with locks: list holders and waiters, end a hold, read the history of breaks."""
