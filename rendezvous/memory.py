"""A store in memory that behaves like etcd v3: for tests, and for a simulator on a virtual clock.

`MemoryKeys` is the state alone: no thread, no clock, no delivery. `SharedKeys` puts it on the real clock for several
clients, and `MemoryStore` is one client.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from dlaunch.clock import now as clock_now

from .limits import refusal
from .store import (
    Answer,
    Answered,
    Change,
    Changes,
    Compare,
    CountMembers,
    Delete,
    GetVersion,
    GrantLease,
    Heard,
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
    StoreError,
    Target,
    Trouble,
    Txn,
    TxnAnswer,
    WatchLost,
)

MIN_TTL_S = 2  # etcd's floor with its default election timeout of 1 s
AFTER_ALL_KEYS = chr(0x10FFFF)  # no key of ours starts with it


class _Lease:
    """A lease: its keys, and when it ends unless it is renewed."""

    __slots__ = ("ends_at", "keys", "ttl_s")

    def __init__(self, ttl_s: int, ends_at: float) -> None:
        self.ttl_s = ttl_s
        self.ends_at = ends_at
        self.keys: set[str] = set()

    def copy(self) -> _Lease:
        other = _Lease(self.ttl_s, self.ends_at)
        other.keys = set(self.keys)
        return other


class MemoryKeys:
    """Keys, leases and history, as etcd v3 keeps them. Pure: time comes as an argument (seconds, any clock).

    Leases end when `expire` is called, never by themselves, so a caller may end them late, as etcd does.
    """

    def __init__(self, min_ttl_s: int = MIN_TTL_S) -> None:
        self.revision = 1  # as a fresh etcd
        self.compacted = 0  # what was before this revision cannot be watched any more
        self.version = "3.6.0"  # of the etcd that this is like
        self.members = 1
        self._min_ttl_s = min_ttl_s
        self._kvs: dict[str, KeyValue] = {}
        self._names: list[str] = []  # sorted
        self._history: list[tuple[Change, ...]] = []  # of each revision, the last is `revision`'s
        self._leases: dict[int, _Lease] = {}
        self._ends: list[tuple[float, int]] = []  # a heap; an entry may be earlier than its lease's end, never later
        self.next_lease = 1  # ids of leases never come back: etcd makes them of the time (pkg/idutil/id.go)

    def copy(self) -> MemoryKeys:
        """The same state, apart: a snapshot to go back to."""
        other = MemoryKeys(self._min_ttl_s)
        other.revision, other.compacted, other.next_lease = self.revision, self.compacted, self.next_lease
        other.version, other.members = self.version, self.members
        other._kvs, other._names, other._history = dict(self._kvs), list(self._names), list(self._history)
        other._leases = {lease: state.copy() for lease, state in self._leases.items()}
        other._ends = list(self._ends)
        return other

    # --- requests --------------------------------------------------------------------------------------------------

    def apply(self, request: Request, now: float) -> Answer | StoreError:  # noqa: PLR0911  -- one for each request
        """Perform a request, whole or not at all."""
        if (refused := refusal(request)) is not None:
            return refused
        match request:
            case Range():
                return self._range(request)
            case Txn():
                return self._txn(request)
            case GrantLease():
                return self._grant(request.ttl_s, now)
            case KeepAlive():
                return LeaseAlive(self.revision, self._renew(request.lease, now))
            case RevokeLease():
                self._end_lease(request.lease)
                return LeaseRevoked(self.revision)
            case LookAtLease():
                return LeaseAlive(self.revision, self._left(request.lease, now))
            case GetVersion():
                return ServerVersion(self.version)
            case CountMembers():
                return MemberCount(self.members)

    def _range(self, wanted: Range) -> RangeAnswer:
        names = self._names_in(wanted.key, wanted.prefix, wanted.end)
        count = len(names)
        if wanted.count_only:
            return RangeAnswer(self.revision, (), count)
        more = 0 < wanted.limit < count
        found = (self._kvs[name] for name in (names[: wanted.limit] if more else names))
        kvs = tuple(kv._replace(value=b"") for kv in found) if wanted.keys_only else tuple(found)
        return RangeAnswer(self.revision, kvs, count, more)

    def _names_in(self, key: str, prefix: bool, end: str) -> list[str]:
        if not prefix and not end:
            return [key] if key in self._kvs else []
        first = bisect_left(self._names, key)
        return self._names[first : bisect_left(self._names, end or key + AFTER_ALL_KEYS, lo=first)]

    def _txn(self, txn: Txn) -> TxnAnswer | StoreError:
        succeeded = all(self._holds(compare) for compare in txn.compares)
        branch = txn.success if succeeded else txn.failure
        for operation in branch:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self._leases:
                return StoreError(Trouble.NO_LEASE, f"The lease {operation.lease:x} does not exist.")
        changes: list[Change] = []
        ranges = [answer for operation in branch if (answer := self._perform(operation, changes)) is not None]
        self._record(changes)
        return TxnAnswer(self.revision, succeeded, tuple(r._replace(revision=self.revision) for r in ranges))

    def _holds(self, compare: Compare) -> bool:
        kv = self._kvs.get(compare.key)
        match compare.target:
            case Target.VALUE:
                return kv is not None and kv.value == compare.value
            case Target.CREATE_REVISION:
                return (kv.create_revision if kv else 0) == compare.value
            case Target.MOD_REVISION:
                return (kv.mod_revision if kv else 0) == compare.value
            case Target.LEASE:
                return (kv.lease if kv else 0) == compare.value

    def _perform(self, operation: Operation, changes: list[Change]) -> RangeAnswer | None:
        match operation:
            case Range():
                return self._range(operation)
            case Put():
                changes.append(self._put(operation))
            case Delete():
                changes.extend(self._delete(name) for name in self._names_in(operation.key, operation.prefix, ""))
        return None

    def _put(self, put: Put) -> Change:
        revision = self.revision + 1
        before = self._kvs.get(put.key)
        if before is None:
            insort(self._names, put.key)
        elif before.lease:
            self._leases[before.lease].keys.discard(put.key)
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        created = before.create_revision if before else revision
        self._kvs[put.key] = KeyValue(put.key, put.value, created, revision, put.lease)
        return Change(put.key, put.value, created, revision, put.lease)

    def _delete(self, name: str) -> Change:
        before = self._kvs.pop(name)
        del self._names[bisect_left(self._names, name)]
        if before.lease:
            self._leases[before.lease].keys.discard(name)
        return Change(name, None, 0, self.revision + 1)

    def _record(self, changes: list[Change]) -> None:
        """Make all that was changed one revision; what changed nothing makes none."""
        if changes:
            self.revision += 1
            self._history.append(tuple(changes))

    # --- leases ----------------------------------------------------------------------------------------------------

    def _grant(self, ttl_s: int, now: float) -> LeaseGranted:
        ttl_s = max(ttl_s, self._min_ttl_s)
        lease = self.next_lease
        self.next_lease += 1
        self._leases[lease] = _Lease(ttl_s, now + ttl_s)
        heapq.heappush(self._ends, (now + ttl_s, lease))
        return LeaseGranted(self.revision, lease, ttl_s)

    def _left(self, lease: int, now: float) -> int:
        """Whole seconds that a lease has left: 1 in its last second, 0 when it is gone."""
        state = self._leases.get(lease)
        return max(1, int(state.ends_at - now)) if state and state.ends_at > now else 0

    def _renew(self, lease: int, now: float) -> int:
        state = self._leases.get(lease)
        if state is None:
            return 0
        if state.ends_at <= now:  # too late, as with etcd, though its keys may still be there
            self._end_lease(lease)
            return 0
        state.ends_at = now + state.ttl_s
        return state.ttl_s

    def _end_lease(self, lease: int) -> None:
        if lease in self._leases:
            self._record([self._delete(name) for name in sorted(self._leases[lease].keys)])
            del self._leases[lease]

    def next_expiry(self) -> float | None:
        """When the next lease ends, unless it is renewed."""
        while self._ends:
            at, lease = self._ends[0]
            state = self._leases.get(lease)
            if state is None:
                heapq.heappop(self._ends)
            elif state.ends_at > at:
                heapq.heapreplace(self._ends, (state.ends_at, lease))
            else:
                return at
        return None

    def expire(self, now: float) -> tuple[int, ...]:
        """End the leases whose time is up, and delete their keys; returns these leases in the order of their ends."""
        ended = []
        while (at := self.next_expiry()) is not None and at <= now:
            lease = heapq.heappop(self._ends)[1]
            self._end_lease(lease)
            ended.append(lease)
        return tuple(ended)

    def extend_leases(self, now: float) -> None:
        """Give every lease its whole time again, as a new leader of etcd does."""
        for state in self._leases.values():
            state.ends_at = max(state.ends_at, now + state.ttl_s)

    # --- history ---------------------------------------------------------------------------------------------------

    def changes_since(self, revision: int, key: str, prefix: bool) -> Changes | WatchLost:
        """All changes of a key, or of all that start with it, from a revision (inclusive) to the current one."""
        if revision < self.compacted:
            return WatchLost(f"The changes from revision {revision} on are gone: the store was compacted.")
        first = self.revision - len(self._history) + 1  # the revision of the oldest entry
        entries = self._history[max(revision - first, 0) :]
        if prefix:
            found = tuple(change for entry in entries for change in entry if change.key.startswith(key))
        else:
            found = tuple(change for entry in entries for change in entry if change.key == key)
        return Changes(self.revision, found)

    def compact(self, revision: int) -> None:
        """Forget the changes before a revision."""
        revision = min(revision, self.revision)
        if revision > self.compacted:
            self.compacted = revision
            first = self.revision - len(self._history) + 1
            del self._history[: max(revision - first, 0)]


# --- on the real clock -----------------------------------------------------------------------------------------------


class _Timer(NamedTuple):
    at: float
    order: int
    run: Callable[[], None]


class SharedKeys:
    """Keys that several `MemoryStore` of one process share, on the real clock. Thread-safe."""

    def __init__(self, keys: MemoryKeys | None = None) -> None:
        self._keys = keys or MemoryKeys()
        self._changed = threading.Condition(threading.RLock())
        self._watches: list[_MemoryWatch] = []
        self._timers: list[_Timer] = []
        self._order = 0
        self._thread: threading.Thread | None = None

    def apply(self, request: Request) -> Answer | StoreError:
        """Perform a request, and tell the watches."""
        with self._changed:
            self._keys.expire(clock_now())
            answer = self._keys.apply(request, clock_now())
            self._tell()
            if isinstance(request, GrantLease | KeepAlive):
                self._wake()
            return answer

    def compact(self, revision: int) -> None:
        """Forget the changes before a revision."""
        with self._changed:
            self._keys.compact(revision)

    def after(self, delay_s: float, run: Callable[[], None]) -> None:
        """Run something on the thread of these keys, later."""
        with self._changed:
            self._order += 1
            heapq.heappush(self._timers, _Timer(clock_now() + delay_s, self._order, run))
            self._wake()

    def add(self, watch: _MemoryWatch) -> None:
        """Tell a watch what it has missed, and from now on all that it should hear."""
        with self._changed:
            self._watches.append(watch)
            self._tell()

    def remove(self, watch: _MemoryWatch) -> None:
        """Tell a watch nothing more."""
        with self._changed:
            if watch in self._watches:
                self._watches.remove(watch)

    def tell(self) -> None:
        """Let the watches hear what they have missed."""
        with self._changed:
            self._tell()

    def _tell(self) -> None:
        for watch in tuple(self._watches):
            if not watch.catch_up(self._keys):
                self._watches.remove(watch)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_time, name="dlaunch-memory-store", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _keep_time(self) -> None:
        with self._changed:
            while True:
                now = clock_now()
                if self._keys.expire(now):
                    self._tell()
                while self._timers and self._timers[0].at <= now:
                    heapq.heappop(self._timers).run()
                times = [timer.at for timer in self._timers[:1]]
                if (expiry := self._keys.next_expiry()) is not None:
                    times.append(expiry)
                self._changed.wait(max(min(times) - clock_now(), 0) if times else None)


class _MemoryWatch:
    """A watch of a `MemoryStore`."""

    def __init__(self, store: MemoryStore, key: str, prefix: bool, from_revision: int, heard: Heard) -> None:
        self._store = store
        self._key = key
        self._prefix = prefix
        self._next = from_revision
        self._heard = heard
        self._over = False

    def catch_up(self, keys: MemoryKeys) -> bool:
        """Post what happened since the last time; returns whether the watch goes on."""
        if self._over or self._store.is_cut:
            return not self._over
        news = keys.changes_since(self._next, self._key, self._prefix)
        if isinstance(news, WatchLost):
            self._over = True
            self._store.post(self, partial(self._heard, news))
            return False
        self._next = max(self._next, news.revision + 1)
        if news.changes:
            self._store.post(self, partial(self._heard, news))
        return True

    def cancel(self) -> None:
        self._over = True
        self._store.forget(self)


class MemoryStore:
    """A `Store` on `SharedKeys`. ``deliver`` posts a function to the thread of the store's owner."""

    def __init__(self, deliver: Callable[[Callable[[], None]], None], shared: SharedKeys | None = None) -> None:
        self.shared = shared or SharedKeys()
        self.is_cut = False  # whether this client cannot reach the keys
        self._deliver = deliver
        self._watches: set[_MemoryWatch] = set()
        self._closed = False

    def request(self, request: Request, timeout_s: float, answered: Answered) -> None:
        """Perform ``request``; see `Store.request`."""
        if self.is_cut:
            error = StoreError(Trouble.TIMEOUT, f"The store in memory did not answer within {timeout_s:g} s.")
            self.shared.after(timeout_s, partial(self._post_answer, answered, error))
        else:
            self._post_answer(answered, self.shared.apply(request))

    def watch(self, key: str, *, prefix: bool, from_revision: int, heard: Heard) -> _MemoryWatch:
        """Hear of changes; see `Store.watch`."""
        watch = _MemoryWatch(self, key, prefix, from_revision, heard)
        self._watches.add(watch)
        self.shared.add(watch)
        return watch

    def close(self) -> None:
        """Call back no more."""
        self._closed = True
        for watch in tuple(self._watches):
            watch.cancel()

    def cut(self) -> None:
        """Lose the connection: requests get no answer and watches hear nothing, until `heal`."""
        self.is_cut = True

    def heal(self) -> None:
        """Reach the keys again; watches go on where they were."""
        self.is_cut = False
        self.shared.tell()

    def post(self, watch: _MemoryWatch, call: Callable[[], None]) -> None:
        """Have a watch's callback made by the owner, unless the watch was cancelled by then."""
        self._deliver(lambda: call() if watch in self._watches else None)

    def forget(self, watch: _MemoryWatch) -> None:
        """Nothing of this watch is wanted any more."""
        self._watches.discard(watch)
        self.shared.remove(watch)

    def _post_answer(self, answered: Answered, answer: Answer | StoreError) -> None:
        self._deliver(lambda: None if self._closed else answered(answer))
