"""What a store refuses whatever is in it: requests beyond etcd's limits, and those that contradict themselves.

Source: etcd 3.5, server/etcdserver/api/v3rpc/key.go (checkTxnRequest, checkIntervals) and server/embed/config.go.
"""

from __future__ import annotations

from .store import MAX_OPERATIONS, MAX_REQUEST_BYTES, Delete, Operation, Put, Range, Request, StoreError, Trouble, Txn


def refusal(request: Request) -> StoreError | None:
    """Why no store takes this request, or None. It costs no round trip, and both stores say the same."""
    match request:
        case Range():
            return None if request.key or request.prefix else _refused(Trouble.OTHER, "a request names no key")
        case Txn():
            return _too_many(request) or _too_large(request) or _contradiction(request)
    return None


def _refused(trouble: Trouble, what: str) -> StoreError:
    return StoreError(trouble, f"The store does not take this: {what}.")


def _too_many(txn: Txn) -> StoreError | None:
    most = max(len(txn.compares), len(txn.success), len(txn.failure))
    if most <= MAX_OPERATIONS:
        return None
    return _refused(Trouble.TOO_LARGE, f"{most} operations in one transaction, of {MAX_OPERATIONS} allowed")


def _too_large(txn: Txn) -> StoreError | None:
    size = request_bytes(txn)
    if size <= MAX_REQUEST_BYTES:
        return None
    return _refused(Trouble.TOO_LARGE, f"a request of {size} bytes, of {MAX_REQUEST_BYTES} allowed")


def request_bytes(txn: Txn) -> int:
    """About how many bytes a transaction takes on the wire; never less than its keys and values."""
    size = 0
    for compare in txn.compares:
        size += len(compare.key) + (len(compare.value) if isinstance(compare.value, bytes) else 10) + 16
    for operation in (*txn.success, *txn.failure):
        size += len(operation.key) + (len(operation.value) if isinstance(operation, Put) else 0) + 16
    return size


def _contradiction(txn: Txn) -> StoreError | None:
    for branch in (txn.success, txn.failure):
        if not all(operation.key or _is_prefix(operation) for operation in branch):
            return _refused(Trouble.OTHER, "a request names no key")
        twice = _written_twice(branch)
        if twice is not None:
            return _refused(Trouble.OTHER, f"one transaction writes the key {twice!r} twice")
    return None


def _is_prefix(operation: Operation) -> bool:
    return isinstance(operation, Range | Delete) and operation.prefix


def _written_twice(branch: tuple[Operation, ...]) -> str | None:
    puts: set[str] = set()
    for operation in branch:
        if isinstance(operation, Put):
            if operation.key in puts:
                return operation.key
            puts.add(operation.key)
    for operation in branch:
        if isinstance(operation, Delete):
            hit = (key for key in puts if (key.startswith(operation.key) if operation.prefix else key == operation.key))
            if (key := next(hit, None)) is not None:
                return key
    return None
