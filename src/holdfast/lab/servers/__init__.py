"""Models of servers in memory: Redis (``store``), and memcached."""
