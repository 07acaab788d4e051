"""The JSON gateway of etcd v3: how requests become HTTP bodies, and bodies become answers.

Keys and values are base64; 64-bit numbers are text. A key of another program may be any bytes, so keys are converted
without loss in both directions (with surrogates). A field that is missing in a body is zero, empty or false, as always
in protobuf.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeAlias

from holdfast.protocol.intents.maintenance import (
    Alarm,
    Entry,
    ListAlarms,
    ListMembers,
    MemberList,
    MemberStatus,
    Question,
    ReadRoles,
)
from holdfast.protocol.intents.requests import (
    Compare,
    Created,
    Delete,
    Found,
    Get,
    GrantLease,
    Item,
    KeepLease,
    LeaseLife,
    Modified,
    Older,
    Operation,
    Put,
    ReadLease,
    Txn,
    TxnResult,
    Watch,
)

TXN: Final = "/v3/kv/txn"
RANGE: Final = "/v3/kv/range"
DELETE: Final = "/v3/kv/deleterange"
GRANT: Final = "/v3/lease/grant"
KEEP: Final = "/v3/lease/keepalive"
TIME_TO_LIVE: Final = "/v3/lease/timetolive"
WATCH: Final = "/v3/watch"
AUTHENTICATE: Final = "/v3/auth/authenticate"
MEMBERS: Final = "/v3/cluster/member/list"
STATUS: Final = "/v3/maintenance/status"
ALARM: Final = "/v3/maintenance/alarm"
USER: Final = "/v3/auth/user/get"

HttpRequest: TypeAlias = Txn | GrantLease | KeepLease | ReadLease | Question

_dumps: Final = json.JSONEncoder(separators=(",", ":")).encode
_BEYOND: Final = 2**63  # numbers of etcd are less
_LONGEST_TOKEN: Final = 2**16
# What a body that etcd would not send can raise here. RecursionError: it is nested too deeply. OverflowError: Infinity.
_UNLIKE_ETCD: Final = (
    *(ValueError, KeyError, TypeError, AttributeError),
    *(RecursionError, OverflowError, MemoryError),
)


_ALARM: Final = re.compile(r"memberID:(\d+) alarm:(\w+)")  # among the errors of a status


class Unreadable(Exception):
    """The body of an answer is not what etcd would send."""


def body(content: Any) -> bytes:
    return _dumps(content).encode()


def _coded(text: str) -> str:
    return b64encode(text.encode(errors="surrogateescape")).decode()


def _text(coded: str, errors: str = "replace") -> str:
    return b64decode(coded).decode(errors=errors)


def _number(value: Any) -> int:
    number = int(value)
    if not -_BEYOND <= number < _BEYOND:
        raise Unreadable
    return number


def write(request: HttpRequest) -> tuple[str, bytes]:
    """The path and the body of a request."""
    if type(request) is Txn:
        if (plain := _plain(request)) is not None:
            (content,) = _operation(plain).values()
            return RANGE if type(plain) is Get else DELETE, body(content)
        return TXN, body(_txn(request))
    if type(request) is GrantLease:
        return GRANT, body({"TTL": str(request.seconds)})
    if type(request) is ReadLease:
        return TIME_TO_LIVE, body({"ID": str(request.lease)})
    if type(request) is KeepLease:
        return KEEP, body({"ID": str(request.lease)})
    if type(request) is ReadRoles:
        return USER, body({"name": request.user})
    if type(request) is ListAlarms:
        return ALARM, body({"action": "GET"})
    return MEMBERS if type(request) is ListMembers else STATUS, body({})


def _plain(txn: Txn) -> Get | Delete | None:
    """The one operation of a transaction without compares that only reads or deletes.

    As a request of its own it costs less, and an etcd allows it that is so full that it refuses every transaction.
    """
    if len(txn.then) == 1 and not txn.compares:
        (only,) = txn.then
        return only if isinstance(only, Get | Delete) else None
    return None


def _txn(txn: Txn) -> dict[str, Any]:
    content: dict[str, Any] = {"success": [_operation(each) for each in txn.then]}
    if txn.compares:
        content["compare"] = [_compare(each) for each in txn.compares]
    if txn.otherwise:
        content["failure"] = [_operation(each) for each in txn.otherwise]
    return content


def _compare(compare: Compare) -> dict[str, Any]:
    if type(compare) is Modified:
        return {"target": "MOD", "key": _coded(compare.key), "mod_revision": str(compare.revision)}
    assert type(compare) is Created or type(compare) is Older
    content = {"target": "CREATE", "key": _coded(compare.key), "create_revision": str(compare.revision)}
    if type(compare) is Older:
        content["result"] = "LESS"
    if compare.end:
        content["range_end"] = _coded(compare.end)
    return content


def _operation(operation: Operation) -> dict[str, Any]:
    if isinstance(operation, Txn):
        return {"request_txn": _txn(operation)}
    key = _coded(operation.key)
    if type(operation) is Put:
        content: dict[str, Any] = {"key": key, "value": _coded(operation.value)}
        if operation.lease:
            content["lease"] = str(operation.lease)
        return {"request_put": content}
    if type(operation) is Delete:
        return {"request_delete_range": {"key": key}}
    assert type(operation) is Get
    content = {"key": key}
    if operation.end:
        content["range_end"] = _coded(operation.end)
    if operation.keys_only:
        content["keys_only"] = True
    elif operation.end:
        content["sort_target"] = "CREATE"
        content["sort_order"] = "DESCEND" if operation.newest_first else "ASCEND"
    if operation.limit:
        content["limit"] = str(operation.limit)
    if operation.created_before:
        content["max_create_revision"] = str(operation.created_before - 1)
    if operation.count_only:
        content["count_only"] = True
    return {"request_range": content}


def read(request: HttpRequest, answer: bytes | bytearray, headers: Mapping[str, str]) -> Any:
    """The answer of etcd to this request. Unreadable if the body is not such an answer."""
    try:
        content = json.loads(answer)
        if type(request) is Txn:
            revision = _number(content["header"]["revision"])
            if (plain := _plain(request)) is not None:
                name = "response_range" if type(plain) is Get else "response_delete_range"
                return TxnResult(True, revision, (_result(plain, {name: content}, revision),))
            return _txn_result(request, content, revision)
        if isinstance(request, Question):
            return _answer(request, content, headers)
        life = content["result"] if type(request) is KeepLease else content
        lease = LeaseLife(_number(life.get("ID", 0)), max(0, _number(life.get("TTL", 0))))
    except _UNLIKE_ETCD:
        raise Unreadable from None
    if type(request) is GrantLease and lease.lease <= 0:
        raise Unreadable  # a key that is put with the lease 0 would never expire
    return lease


def _answer(question: Question, content: dict[str, Any], headers: Mapping[str, str]) -> Any:
    header = content["header"]
    if type(question) is ListMembers:
        members = tuple(
            Entry(
                str(each["ID"]),
                str(each.get("name", "")),
                tuple(map(str, each.get("clientURLs", ()))),
                bool(each.get("isLearner", False)),
            )
            for each in content["members"]
        )
        return MemberList(str(header["cluster_id"]), str(header["member_id"]), members)
    if type(question) is ListAlarms:
        return tuple(Alarm(str(each["alarm"]), str(each["memberID"])) for each in content.get("alarms", ()))
    if type(question) is ReadRoles:
        return tuple(map(str, content.get("roles", ())))
    return MemberStatus(
        version=str(content["version"]),
        leader=str(content.get("leader", "")),
        revision=_number(header.get("revision", 0)),
        size=_number(content.get("dbSize", 0)),
        in_use=_number(content.get("dbSizeInUse", 0)),
        quota=_number(content.get("dbSizeQuota", 0)),
        alarms=tuple(Alarm(kind, member) for member, kind in _ALARM.findall(" ".join(content.get("errors", ())))),
        date=_date(headers.get("date", "")),
    )


def _date(text: str) -> float | None:
    """The time in a Date header; None if a proxy left it out or wrote something else."""
    try:
        return parsedate_to_datetime(text).timestamp()
    except _UNLIKE_ETCD:
        return None


def read_token(answer: bytes | bytearray, headers: Mapping[str, str]) -> str:
    """The token of an answer to AUTHENTICATE. Unreadable if there is none that fits into a header."""
    try:
        token = json.loads(answer)["token"]
        if token.isascii() and token.isprintable() and 0 < len(token) <= _LONGEST_TOKEN:
            return str(token)
    except _UNLIKE_ETCD:
        pass
    raise Unreadable


def _txn_result(txn: Txn, content: dict[str, Any], revision: int) -> TxnResult:
    succeeded = bool(content.get("succeeded", False))
    operations = txn.then if succeeded else txn.otherwise
    answers = content.get("responses", [])
    if len(answers) != len(operations):
        raise Unreadable
    results = tuple(_result(one, each, revision) for one, each in zip(operations, answers, strict=True))
    return TxnResult(succeeded, revision, results)


def _result(operation: Operation, answer: dict[str, Any], revision: int) -> Any:
    if type(operation) is Put:
        return None
    if type(operation) is Txn:
        return _txn_result(operation, answer["response_txn"], revision)
    if type(operation) is Delete:
        return _number(answer["response_delete_range"].get("deleted", 0))
    content = answer["response_range"]
    return Found(tuple(_item(each) for each in content.get("kvs", ())), _number(content.get("count", 0)))


def _item(content: dict[str, Any]) -> Item:
    return Item(
        _text(content["key"], "surrogateescape"),
        _text(content.get("value", "")),
        _number(content["create_revision"]),
        _number(content["mod_revision"]),
        _number(content.get("lease", 0)),
    )


def write_watch(watch: Watch) -> bytes:
    content: dict[str, Any] = {"key": _coded(watch.key), "start_revision": str(watch.revision)}
    if watch.end:
        content["range_end"] = _coded(watch.end)
    if not watch.puts:
        content["filters"] = ["NOPUT"]
    return body({"create_request": content})


def is_begun(line: bytes) -> bool:
    """Whether a line of a watch only says that the watch has begun."""
    try:
        result = json.loads(line)["result"]
        return bool(result.get("created")) and not result.get("canceled") and not result.get("events")
    except _UNLIKE_ETCD:
        return False


def is_event(line: bytes) -> bool:
    """Whether a line of a watch says that something changed, or that its revision was compacted."""
    try:
        result = json.loads(line)["result"]
        return bool(result.get("events") or int(result.get("compact_revision", 0)))
    except _UNLIKE_ETCD:
        return False
