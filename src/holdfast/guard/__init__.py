"""Fences that are enforced: writes which the resource refuses once a later holder has written.

    from holdfast import guard

    with client.lock("order:42") as lease:
        guard.RedisGuard(redis_client).set("state:42", "paid", lease)
        guard.Table("orders", key="id").put(connection, {"id": 42, "state": "paid"}, lease)
        guard.replace_file("order-42.json", data, lease)

Each raises StaleFence if the holder was succeeded meanwhile, and writes nothing. The rule is told in
``guard/stamp.py``. The connections are the caller's, and so are the errors of their libraries, which pass as they are.
"""

from holdfast.guard.file import enter_file, replace_file
from holdfast.guard.redis import AioRedisGuard, RedisGuard
from holdfast.guard.sql import Statement, Table
from holdfast.guard.stamp import Stamp, stamp

__all__ = ["AioRedisGuard", "RedisGuard", "Stamp", "Statement", "Table", "enter_file", "replace_file", "stamp"]
