"""How members keep each other's workers alive while the store is out of reach: promises and vouches. Pure.

A member that misses a renewal asks group rank 0 to vouch for it. Rank 0 asks every member, itself included, to
promise: for T it takes no lapsed lease in this round for a proof. The vouch lasts as long as the shortest promise.
Promises and vouches count, for those who rely on them, from when they were asked for. docs/protocol.md has the rules,
and what breaks without each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .values import Peer

Message = dict[str, Any]
MOST_S = 1e12  # no clock of ours shows so much; NaN is not below it either


class ToPeer(NamedTuple):
    """A message, and whom it is for."""

    node_id: str
    message: Message


class Vouching:
    """One agent's part in one round: it promises; as group rank 0 it collects promises and vouches."""

    def __init__(self, lease_ttl_s: float) -> None:
        self._promise_s = lease_ttl_s
        self._ask_every_s = lease_ttl_s / 4
        self._keep_asking_s = lease_ttl_s * 0.75
        self._number = 0
        self._members: dict[str, Peer] = {}  # known to group rank 0 only
        self._wanted: dict[str, tuple[float, float]] = {}  # who wants a vouch: asked at (their clock), heard at (ours)
        self._promises: dict[str, float] = {}  # until when each member promised (our clock)
        self._asked_at: float | None = None
        self._sent_until: dict[str, float] = {}  # the end of the last vouch that was sent to each
        self.promised_until = float("-inf")  # our own promise; it runs its full time, whatever comes

    def enter(self, number: int, members: tuple[Peer, ...]) -> None:
        """The round that this agent is a member of; ``members`` only for group rank 0."""
        if number != self._number:
            self.promised_until = float("-inf")  # a promise is for one round
        self._number = number
        self._members = {peer.node_id: peer for peer in members}
        self._wanted, self._promises, self._sent_until = {}, {}, {}
        self._asked_at = None

    def address(self, node_id: str) -> Peer | None:
        """A member's address, where group rank 0 knows it."""
        return self._members.get(node_id)

    def ask(self, now: float) -> Message:
        """A member's request to group rank 0."""
        return {"kind": "vouch_me", "round": self._number, "asked_at": now}

    def heard_wish(self, sender: str, message: Message, now: float) -> list[ToPeer]:
        """Group rank 0 is asked for a vouch, while the round simply runs and its own workers with it."""
        asked_at = _number(message, "asked_at")
        if message.get("round") != self._number or sender not in self._members or asked_at is None:
            return []
        self._wanted[sender] = (asked_at, now)
        self._sent_until.pop(sender, None)
        return [*self.collect(now), *self._vouch(now)]

    def collect(self, now: float) -> list[ToPeer]:
        """Ask all members for promises while anyone wants a vouch; not more often than is of use."""
        self._wanted = {who: wish for who, wish in self._wanted.items() if now - wish[1] < self._keep_asking_s}
        if not self._wanted or (self._asked_at is not None and now - self._asked_at < self._ask_every_s):
            return []
        self._asked_at = now
        message = {"kind": "promise_me", "round": self._number, "asked_at": now}
        return [ToPeer(node_id, message) for node_id in self._members]

    def promise(self, message: Message, now: float) -> Message | None:
        """Our promise, given now; the caller has checked that the round simply runs as far as we know."""
        asked_at = _number(message, "asked_at")
        if message.get("round") != self._number or asked_at is None:
            return None
        self.promised_until = max(self.promised_until, now + self._promise_s)
        return {"kind": "promise", "round": self._number, "asked_at": asked_at}

    def heard_promise(self, sender: str, message: Message, now: float) -> list[ToPeer]:
        """A member has promised, counted from when we asked for it."""
        asked_at = _number(message, "asked_at")
        if message.get("round") != self._number or sender not in self._members or asked_at is None or asked_at > now:
            return []
        until = asked_at + self._promise_s
        self._promises[sender] = max(self._promises.get(sender, until), until)
        return self._vouch(now)

    def _vouch(self, now: float) -> list[ToPeer]:
        until = min((self._promises.get(member, float("-inf")) for member in self._members), default=float("-inf"))
        if until <= now:
            return []
        sent = []
        for who, (asked_at, _heard_at) in self._wanted.items():
            if until > self._sent_until.get(who, float("-inf")):
                self._sent_until[who] = until
                message = {"kind": "vouch", "round": self._number, "asked_at": asked_at, "for_s": until - now}
                sent.append(ToPeer(who, message))
        return sent

    def heard_vouch(self, message: Message, now: float, lease_deadline: float, limit_s: float) -> float | None:
        """Until when a vouch lets our workers live, if it is one for us."""
        asked_at, for_s = _number(message, "asked_at"), _number(message, "for_s")
        if message.get("round") != self._number or asked_at is None or for_s is None or asked_at > now:
            return None
        return min(asked_at + min(for_s, self._promise_s), lease_deadline + limit_s)


def _number(message: Message, name: str) -> float | None:
    value = message.get(name)
    sound = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST_S
    return float(value) if sound else None  # type: ignore[arg-type]  # what is sound is a number
