"""The engine for memcached: runs the programs of protocol/memcached.py by pymemcache."""
