"""An etcd for many agents on one virtual clock: the memory store's keys, reached over ways that fail as etcd's do."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

from dlaunch.rendezvous.memory import MemoryKeys
from dlaunch.rendezvous.store import (
    Answer,
    Change,
    Changes,
    GrantLease,
    LeaseGranted,
    Range,
    RangeAnswer,
    Request,
    RevokeLease,
    StoreError,
    Trouble,
    Txn,
    WatchLost,
)

from .clock import Due, Scheduler
from .faults import Leases, Snag, Trap
from .story import Story
from .weather import Weather

Answered = Callable[[Answer | StoreError], None]
Heard = Callable[[Changes | WatchLost], None]
Observer = Callable[[int, "tuple[Change, ...]"], None]

RECONNECT_S = (0.02, 1.0)  # until a client finds its way back
WRITES = (Txn, GrantLease, RevokeLease)


class Etcd:
    """The cluster, as all its clients together see it."""

    def __init__(self, scheduler: Scheduler, dice: random.Random, weather: Weather, story: Story) -> None:
        self.keys = MemoryKeys()
        self.scheduler, self.dice, self.weather, self.story = scheduler, dice, weather, story
        self.up = True
        self.refuses = False  # while it is down: its hosts answer that nobody listens
        self.observers: list[Observer] = []
        self.clients: list[Client] = []
        self.revision = 1
        self.counts = {"requests": 0, "writes": 0, "watch events": 0}
        self._writable_at = 0.0
        self._watches: dict[tuple[str, bool], dict[Watching, None]] = defaultdict(dict)
        self.performing: Client | None = None  # for whom something is being written; None: a lease has run out
        self._look: Due | None = None  # for leases that have run out
        self._snapshot: tuple[MemoryKeys, int] | None = None

    # --- what clients do -----------------------------------------------------------------------------------------

    def client(self, name: str) -> Client:
        """A new client of the cluster."""
        client = Client(self, name)
        self.clients.append(client)
        return client

    def perform(self, client: Client, request: Request) -> Answer | StoreError:
        """Perform a request now; everything that watches hears of it in its own time."""
        now = self.scheduler.now
        self.counts["requests"] += 1
        answer = self.keys.apply(request, now)
        if self.keys.revision != self.revision:
            self.counts["writes"] += 1
            self.performing = client
            self._publish()
            self.performing = None
        if isinstance(answer, LeaseGranted):
            self._look_for_expired()
        return answer

    def writable_in(self) -> float:
        """Seconds until a leader is there."""
        return self._writable_at - self.scheduler.now

    def since(self, revision: int, key: str, prefix: bool) -> Changes | WatchLost:
        """What has changed from a revision on."""
        return self.keys.changes_since(revision, key, prefix)

    def add_watch(self, watch: Watching) -> None:
        """Tell this watch of what is written from now on."""
        self._watches[watch.key, watch.prefix][watch] = None

    def drop_watch(self, watch: Watching) -> None:
        """Tell it nothing more."""
        self._watches[watch.key, watch.prefix].pop(watch, None)

    def _publish(self) -> None:
        heard = self.keys.changes_since(self.revision + 1, "", True)
        assert isinstance(heard, Changes)
        if not heard.changes:
            return
        by_revision: dict[int, list[Change]] = defaultdict(list)
        for change in heard.changes:
            by_revision[change.mod_revision].append(change)
        for revision in sorted(by_revision):
            self.revision = revision
            changes = tuple(by_revision[revision])
            for observer in self.observers:
                observer(revision, changes)
            self._tell_watches(revision, changes)

    def _tell_watches(self, revision: int, changes: tuple[Change, ...]) -> None:
        for (key, prefix), watches in self._watches.items():
            if not watches:
                continue
            mine = tuple(c for c in changes if (c.key.startswith(key) if prefix else c.key == key))
            if mine:
                told = Changes(revision, mine)
                for watch in watches:
                    watch.tell(told)

    # --- leases --------------------------------------------------------------------------------------------------

    def _look_for_expired(self) -> None:
        at = self.keys.next_expiry()
        if at is None or not self.up:
            return
        at = max(at, self._writable_at, self.scheduler.now) + self.weather.expiry_late.draw(self.dice) + 1e-6
        if self._look is not None and self._look.call is not None and self._look.at <= at:
            return
        if self._look is not None:
            self._look.cancel()
        self._look = self.scheduler.at(at, self._expire)

    def _expire(self) -> None:
        self._look = None
        if self.up and self.writable_in() <= 0:
            self.keys.expire(self.scheduler.now)
            self._publish()
        self._look_for_expired()

    def _renew_all(self) -> None:
        self.keys.extend_leases(self.scheduler.now)

    # --- faults --------------------------------------------------------------------------------------------------

    def stop(self, refuses: bool) -> None:
        """All members are away: their hosts answer that nobody listens, or nothing answers at all."""
        self.story.tell("etcd", "is away: " + ("connections are refused" if refuses else "silence"))
        self.up, self.refuses = False, refuses
        for client in self.clients:
            client.lose_way()

    def start(self, leases: Leases) -> None:
        """All members are back."""
        self.story.tell("etcd", f"is back, leases {leases.value}")
        self.up = True
        if leases is Leases.KEPT:
            self._renew_all()
        elif leases is Leases.LAPSED:
            self.keys.expire(self.scheduler.now)
            self._publish()
        self._look_for_expired()
        for client in self.clients:
            client.find_way()

    def change_leader(self, gap_s: float) -> None:
        """The leader is lost: no writes until there is another, and then all leases have their full time again."""
        self.story.tell("etcd", f"loses its leader for {gap_s:.2f} s")
        self._writable_at = self.scheduler.now + gap_s
        self.scheduler.after(gap_s, self._renew_all)

    def end_leases_early(self, prefix: str) -> None:
        """A deposed leader ends leases that were renewed with its successor: etcd issue 15247."""
        found = self.keys.apply(Range(prefix, prefix=True), self.scheduler.now)
        assert isinstance(found, RangeAnswer)
        for kv in found.kvs:
            if kv.lease and self.up and self.dice.random() < 0.5:
                self.story.tell("etcd", f"a deposed leader ends the lease of {kv.key} before its time")
                self.keys.apply(RevokeLease(kv.lease), self.scheduler.now)
                self._publish()

    def compact(self) -> None:
        """Forget the past."""
        self.story.tell("etcd", f"compacts up to revision {self.revision}")
        self.keys.compact(self.revision)

    def take_snapshot(self) -> None:
        """Keep what stands now."""
        self._snapshot = (self.keys.copy(), self.revision)

    def begin_anew(self) -> None:
        """Another cluster, with nothing in it."""
        before, self.keys = self.keys, MemoryKeys()
        self.keys.version, self.keys.members = before.version, before.members
        self.keys.next_lease = before.next_lease
        self.revision = self.keys.revision
        self.story.tell("etcd", "begins anew, with nothing in it")
        self.start(Leases.KEPT)

    def restore(self) -> None:
        """Go back to the snapshot: revisions fall."""
        if self._snapshot is None:
            return
        next_lease = self.keys.next_lease
        self.keys, self.revision = self._snapshot[0].copy(), self._snapshot[1]
        self.keys.next_lease = next_lease
        self.story.tell("etcd", f"is restored from a snapshot: revision {self.revision}")
        self._renew_all()
        for client in self.clients:
            client.lose_way()
            client.find_way()


class Asked:
    """A request under way, as its sender sees it."""

    __slots__ = ("answered", "is_unheard", "request", "timer")

    def __init__(self, request: Request, answered: Answered) -> None:
        self.request = request
        self.answered: Answered | None = answered
        self.timer: Due | None = None
        self.is_unheard = False  # its answer will be lost

    def close(self, answer: Answer | StoreError) -> None:
        """Answer, once."""
        answered, self.answered = self.answered, None
        if self.timer is not None:
            self.timer.cancel()
        if answered is not None:
            answered(answer)


class Client:
    """One agent's way to the store."""

    def __init__(self, etcd: Etcd, name: str) -> None:
        self._etcd = etcd
        self.name = name
        self.cut = False  # nothing goes through, in either direction
        self.host_is_cut = False  # the same, between this host and the one that the store is on
        self.answers_take_s = 0.0  # more than the way
        self.heard_at = etcd.scheduler.now  # when an answer last came
        self.longest_silence_s = 0.0  # before one came
        self.refused = False  # where it is cut: by a refusal, at once
        self.closed = False
        self._held: list[Asked] = []  # sent into a cut way: the kernel may yet deliver it
        self._watches: dict[Watching, None] = {}

    @property
    def reaches(self) -> bool:
        """Whether what is sent now arrives."""
        return self._etcd.up and not self.cut and not self.host_is_cut

    def ask(self, request: Request, timeout_s: float, answered: Answered, trap: Trap | None = None) -> None:
        """Send a request, into a trap perhaps."""
        etcd, dice, weather = self._etcd, self._etcd.dice, self._etcd.weather
        asked = Asked(request, answered)
        asked.timer = etcd.scheduler.after(timeout_s, self._give_up, asked)
        if not self.reaches:
            if self.refused if self.cut else etcd.refuses:
                etcd.scheduler.after(0.001, asked.close, UNREACHABLE)
            elif dice.random() < 0.3:
                self._held.append(asked)
        elif trap is not None and trap.snag in {Snag.REQUEST_LOST, Snag.LATE}:
            if trap.snag is Snag.LATE:
                etcd.scheduler.after(trap.for_s, self._arrive, asked)
        elif weather.request_lost and dice.random() < weather.request_lost:
            return
        elif weather.write_late and isinstance(request, Txn) and dice.random() < weather.write_late:
            etcd.scheduler.after(weather.late.draw(dice), self._arrive, asked)
        else:
            asked.is_unheard = trap is not None and trap.snag is Snag.ANSWER_LOST
            etcd.scheduler.after(self._way(), self._arrive, asked)

    def _way(self) -> float:
        weather, dice = self._etcd.weather, self._etcd.dice
        slow = weather.store_slow and dice.random() < weather.store_slow
        return (weather.slow if slow else weather.store).draw(dice)

    def _arrive(self, asked: Asked) -> None:
        etcd = self._etcd
        if not self.reaches:
            return
        wait_s = etcd.writable_in()
        if wait_s > 0:
            chance = etcd.dice.random()
            if chance < 0.5:
                etcd.scheduler.after(wait_s + self._way(), self._arrive, asked)
            elif chance < 0.75:
                asked.close(StoreError(Trouble.NO_QUORUM, "etcd has no leader", isinstance(asked.request, WRITES)))
            return
        answer = etcd.perform(self, asked.request)
        if (
            self.closed
            or asked.is_unheard
            or (etcd.weather.answer_lost and etcd.dice.random() < etcd.weather.answer_lost)
        ):
            return
        slow = etcd.weather.answer_slow and etcd.dice.random() < etcd.weather.answer_slow
        way_s = etcd.weather.slow.draw(etcd.dice) if slow else self._way()
        etcd.scheduler.after(way_s + self.answers_take_s, self._hear, asked, answer)

    def _hear(self, asked: Asked, answer: Answer | StoreError) -> None:
        if self.reaches and not self.closed:
            if asked.answered is not None:
                self.longest_silence_s = max(self.longest_silence_s, self.silent_for())
                self.heard_at = self._etcd.scheduler.now
            asked.close(answer)

    def _give_up(self, asked: Asked) -> None:
        if not self.closed:
            asked.close(StoreError(Trouble.TIMEOUT, "etcd did not answer", isinstance(asked.request, WRITES)))

    def watch(self, key: str, prefix: bool, from_revision: int, heard: Heard) -> Watching:
        """Hear of changes from a revision on."""
        watch = Watching(self, self._etcd, key, prefix, from_revision, heard)
        self._watches[watch] = None
        self._etcd.scheduler.after(self._way(), watch.resume)
        return watch

    def unwatch(self, watch: Watching) -> None:
        """Hear nothing more."""
        self._watches.pop(watch, None)
        watch.lose()
        watch.over = True

    def close(self) -> None:
        """The process is gone; what it sent may still arrive."""
        self.closed = True
        for watch in tuple(self._watches):
            self.unwatch(watch)
        self._etcd.clients.remove(self)

    def lose_way(self) -> None:
        """The connection is lost."""
        for watch in self._watches:
            watch.lose()

    def find_way(self) -> None:
        """There may be a way again."""
        if not self.reaches:
            return
        etcd = self._etcd
        held, self._held = self._held, []
        for asked in held:
            etcd.scheduler.after(self._way(), self._arrive, asked)
        if self._watches:
            etcd.scheduler.after(etcd.dice.uniform(*RECONNECT_S), self._resume_watches)

    def _resume_watches(self) -> None:
        for watch in tuple(self._watches):
            watch.resume()

    def set_cut(self, cut: bool, refused: bool = False) -> None:
        """Cut the way, or mend it."""
        self.cut, self.refused = cut, refused
        self.lose_way() if cut else self.find_way()

    def silent_for(self) -> float:
        """For how long no answer has come."""
        return self._etcd.scheduler.now - self.heard_at

    def set_host_cut(self, cut: bool) -> None:
        """Cut the way between its host and the store's, or mend it."""
        if cut != self.host_is_cut:
            self.host_is_cut = cut
            self.lose_way() if cut else self.find_way()


class Watching:
    """One watch: in order, a hint, resumed after a loss of the connection."""

    def __init__(self, client: Client, etcd: Etcd, key: str, prefix: bool, from_revision: int, heard: Heard) -> None:
        self.key, self.prefix = key, prefix
        self.over = False
        self._client, self._etcd = client, etcd
        self._next = from_revision  # of which nothing has been heard yet
        self._heard = heard
        self._runs = 0  # which stream: what an earlier one has sent is lost
        self._streams = False
        self._free_at = 0.0  # what was sent earlier arrives earlier

    def resume(self) -> None:
        """Begin to stream, with what was missed."""
        if self.over or self._streams or not self._client.reaches:
            return
        missed = self._etcd.since(self._next, self.key, self.prefix)
        if isinstance(missed, WatchLost):
            self._client.unwatch(self)
            self._etcd.scheduler.after(0.001, self._heard, missed)
            return
        self._streams = True
        self._etcd.add_watch(self)
        if missed.changes:
            self.tell(missed)

    def lose(self) -> None:
        """The stream breaks; what was under way in it is lost."""
        self._streams = False
        self._runs += 1
        self._etcd.drop_watch(self)

    def tell(self, changes: Changes) -> None:
        """Send changes on their way."""
        etcd, dice, weather = self._etcd, self._etcd.dice, self._etcd.weather
        etcd.counts["watch events"] += 1
        if weather.watch_lost and dice.random() < weather.watch_lost:
            return
        slow = weather.watch_slow and dice.random() < weather.watch_slow
        at = etcd.scheduler.now + (weather.slow if slow else weather.store).draw(dice)
        self._free_at = max(self._free_at, at)
        etcd.scheduler.at(self._free_at, self._hear, changes, self._runs)
        if weather.watch_doubled and dice.random() < weather.watch_doubled:
            etcd.scheduler.at(self._free_at, self._hear, changes, self._runs)

    def _hear(self, changes: Changes, run: int) -> None:
        if run == self._runs and not self.over:
            self._next = max(self._next, changes.revision + 1)
            self._heard(changes)


UNREACHABLE = StoreError(Trouble.UNREACHABLE, "etcd refuses connections")
