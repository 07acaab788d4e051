"""Guarded writes: a resource refuses a write once a later holder has written.

    from holdfast import guard

    with client.lock("order:42") as lease:
        guard.RedisGuard(redis_client).set("state:42", "paid", lease)
        guard.Table("orders", key="id").put(connection, {"id": 42, "state": "paid"}, lease)
        guard.replace_file("order-42.json", data, lease)

Each raises StaleFence, and writes nothing, if a later holder has written. ``guard/stamp.py`` states the rule.
The connections are the caller's; errors of their libraries are raised unchanged.
"""

from holdfast.guard.file import enter_file, replace_file
from holdfast.guard.redis import AioRedisGuard, RedisGuard
from holdfast.guard.sql import Statement, Table
from holdfast.guard.stamp import Stamp, stamp

__all__ = ["AioRedisGuard", "RedisGuard", "Stamp", "Statement", "Table", "enter_file", "replace_file", "stamp"]
