"""A web service whose lock server goes away: how long its answers take, and when it works again."""
