"""etcd's messages: our requests as protobuf, and its answers as our values.

[Note: descriptors of etcd3]
The generated stubs of `etcd3` 0.12.0 were made by a protoc so old that protobuf 4 and later refuses them, unless the
whole process uses protobuf's slow implementation in Python. But each stub holds the descriptor of its messages,
serialized, as a literal; from that, protobuf makes the classes anew, on its fast implementation. So this file reads
the literals, and never imports `etcd3`. Against the import with PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python: a list
of 1,000 keys is parsed in 1 ms in place of 13, the process has 4 MB less and starts 40 ms sooner, and no variable has
to be hidden from workers.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pool, message_factory  # type: ignore[import-untyped]

from dlaunch.errors import ConfigurationError

from .store import (
    Answer,
    Change,
    Compare,
    CountMembers,
    Delete,
    GetVersion,
    GrantLease,
    KeepAlive,
    KeyValue,
    LeaseAlive,
    LeaseGranted,
    LeaseRevoked,
    LookAtLease,
    MemberCount,
    Operation,
    Put,
    Range,
    RangeAnswer,
    Request,
    RevokeLease,
    ServerVersion,
    Target,
    Txn,
    TxnAnswer,
)

PACKAGE = "etcd3"
_LITERAL = "serialized_pb=_b("


def _message_classes() -> Callable[[str], Any]:
    spec = importlib.util.find_spec(PACKAGE)  # imports nothing of it
    folders = (spec.submodule_search_locations if spec else None) or ()
    pool = descriptor_pool.DescriptorPool()  # our own: another etcd3 in this process has the common one
    try:
        folder = Path(next(iter(folders))) / "etcdrpc"
        for name in ("kv", "auth", "rpc"):  # each needs those before it
            pool.AddSerializedFile(_descriptor(folder / f"{name}_pb2.py"))
    except (StopIteration, OSError, ValueError, SyntaxError, TypeError) as error:
        raise ConfigurationError(
            f"The Python package {PACKAGE} is missing or damaged ({type(error).__name__}).", "pip install 'etcd3>=0.12'"
        ) from error
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"etcdserverpb.{name}"))


def _descriptor(path: Path) -> bytes:
    source = path.read_text(encoding="utf-8")
    start = source.index(_LITERAL) + len(_LITERAL)
    literal = source[start : source.index("\n", start)].rstrip().rstrip(",)")
    return str(ast.literal_eval(literal)).encode("latin-1")


_class = _message_classes()


class Method(NamedTuple):
    """A remote procedure of etcd."""

    path: str
    request: Any  # classes of messages
    response: Any


def _method(service: str, name: str, message: str = "") -> Method:
    stem = message or name
    return Method(f"/etcdserverpb.{service}/{name}", _class(f"{stem}Request"), _class(f"{stem}Response"))


RANGE = _method("KV", "Range")
TXN = _method("KV", "Txn")
GRANT = _method("Lease", "LeaseGrant")
REVOKE = _method("Lease", "LeaseRevoke")
LOOK_AT_LEASE = _method("Lease", "LeaseTimeToLive")
# A stream, used for one message each way; on the wire that is the same as a plain call.
KEEP_ALIVE = _method("Lease", "LeaseKeepAlive")
AUTHENTICATE = _method("Auth", "Authenticate")
WATCH = _method("Watch", "Watch")
STATUS = _method("Maintenance", "Status")
MEMBERS = _method("Cluster", "MemberList")

_RequestOp = _class("RequestOp")
_Compare = _class("Compare")
_PutRequest = _class("PutRequest")
_DeleteRequest = _class("DeleteRangeRequest")


def to_bytes(text: str) -> bytes:
    """A key as etcd has it. Keys of others that are not UTF-8 survive the way there and back."""
    return text.encode("utf-8", "surrogateescape")


def to_text(data: bytes) -> str:
    """A key as we have it."""
    return data.decode("utf-8", "surrogateescape")


def span(key: str, prefix: bool, end: str = "") -> tuple[bytes, bytes]:
    """``key`` and ``range_end`` of etcd's ranges. Source: etcd, api/etcdserverpb/rpc.proto, RangeRequest."""
    start = to_bytes(key)
    if end:
        return start or b"\0", to_bytes(end)
    if not prefix:
        return start, b""
    stem = start.rstrip(b"\xff")
    return start or b"\0", stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


# --- requests --------------------------------------------------------------------------------------------------------


def encode(request: Request) -> tuple[Method, Any]:  # noqa: PLR0911  -- one for each request
    """The call that performs a request, and its message."""
    match request:
        case Range():
            return RANGE, _range(request)
        case Txn():
            return TXN, TXN.request(
                compare=[_compare(compare) for compare in request.compares],
                success=[_operation(operation) for operation in request.success],
                failure=[_operation(operation) for operation in request.failure],
            )
        case GrantLease():
            return GRANT, GRANT.request(TTL=request.ttl_s)
        case KeepAlive():
            return KEEP_ALIVE, KEEP_ALIVE.request(ID=request.lease)
        case RevokeLease():
            return REVOKE, REVOKE.request(ID=request.lease)
        case LookAtLease():
            return LOOK_AT_LEASE, LOOK_AT_LEASE.request(ID=request.lease)
        case GetVersion():
            return STATUS, STATUS.request()
        case CountMembers():
            return MEMBERS, MEMBERS.request()


def _range(wanted: Range) -> Any:
    key, end = span(wanted.key, wanted.prefix, wanted.end)
    return RANGE.request(
        key=key, range_end=end, limit=wanted.limit, keys_only=wanted.keys_only, count_only=wanted.count_only
    )


def _compare(compare: Compare) -> Any:
    key = to_bytes(compare.key)
    equal = _Compare.EQUAL
    match compare.target:
        case Target.CREATE_REVISION:
            return _Compare(key=key, result=equal, target=_Compare.CREATE, create_revision=compare.value)
        case Target.MOD_REVISION:
            return _Compare(key=key, result=equal, target=_Compare.MOD, mod_revision=compare.value)
        case Target.LEASE:
            return _Compare(key=key, result=equal, target=_Compare.LEASE, lease=compare.value)
        case Target.VALUE:
            return _Compare(key=key, result=equal, target=_Compare.VALUE, value=compare.value)


def _operation(operation: Operation) -> Any:
    match operation:
        case Range():
            return _RequestOp(request_range=_range(operation))
        case Put():
            put = _PutRequest(key=to_bytes(operation.key), value=operation.value, lease=operation.lease)
            return _RequestOp(request_put=put)
        case Delete():
            key, end = span(operation.key, operation.prefix)
            return _RequestOp(request_delete_range=_DeleteRequest(key=key, range_end=end))


def probe() -> Any:
    """A range that a member answers by itself, whatever the others do."""
    return RANGE.request(key=b"\0", serializable=True, count_only=True)


# --- answers ---------------------------------------------------------------------------------------------------------


def decode(request: Request, reply: Any) -> Answer:  # noqa: PLR0911  -- one for each request
    """What etcd answered to a request."""
    revision = reply.header.revision
    match request:
        case Range():
            return _found(reply, revision)
        case Txn():
            parts = (part.response_range for part in reply.responses if part.HasField("response_range"))
            return TxnAnswer(revision, reply.succeeded, tuple(_found(part, revision) for part in parts))
        case GrantLease():
            return LeaseGranted(revision, reply.ID, reply.TTL)
        case KeepAlive() | LookAtLease():
            return LeaseAlive(revision, max(reply.TTL, 0))
        case RevokeLease():
            return LeaseRevoked(revision)
        case GetVersion():
            return ServerVersion(reply.version)
        case CountMembers():
            return MemberCount(len(reply.members))


def _found(reply: Any, revision: int) -> RangeAnswer:
    return RangeAnswer(revision, tuple(_key_value(kv) for kv in reply.kvs), reply.count, reply.more)


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(to_text(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def change_of(event: Any) -> Change:
    """One event of a watch."""
    kv = event.kv
    deleted = event.type == event.DELETE
    return Change(
        to_text(kv.key), None if deleted else kv.value, 0 if deleted else kv.create_revision, kv.mod_revision, kv.lease
    )


def watch_request(key: str, prefix: bool, from_revision: int) -> Any:
    """Begin a watch on a stream."""
    start, end = span(key, prefix)
    return WATCH.request(create_request={"key": start, "range_end": end, "start_revision": from_revision})


def unwatch_request(watch_id: int) -> Any:
    """End a watch on a stream."""
    return WATCH.request(cancel_request={"watch_id": watch_id})
