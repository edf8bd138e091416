"""What one agent knows of who is gone: rule (3) of the proofs, docs/protocol.md. Pure.

Silence proves nothing. A node of a round counts as fenced when it said so itself, when a peer proved it (both are
reports in the store), or when its lease is absent from a list that this agent made under one of three conditions. What
was once proved stays true.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Proofs:
    """The lapsed leases of one round's members, as one agent may take them for proofs."""

    def __init__(self, lease_ttl_s: float, outage_limit_s: float) -> None:
        self._ttl = lease_ttl_s
        self._promise_s = lease_ttl_s
        self._limit = outage_limit_s + lease_ttl_s
        self._number = 0
        self._ended_at: float | None = None  # when another member was first known to have stopped or gone
        self._absent_since: dict[str, float] = {}  # absent from every list since then
        self._listed_at: float | None = None
        self.fenced: set[str] = set()

    def enter(self, number: int) -> None:
        """A new round: what was known of the last one's members means nothing in it."""
        if number != self._number:
            self._number = number
            self._ended_at = self._listed_at = None
            self._absent_since = {}
            self.fenced = set()

    def knows_of_a_loss(self, number: int) -> bool:
        """Whether a lapsed lease was taken for a proof in this round."""
        return self._number == number and bool(self.fenced)

    def member_ended(self, now: float) -> None:
        """A member of the round is known to have stopped or gone: from now on it promises nothing."""
        if self._ended_at is None:
            self._ended_at = now

    def listed(
        self,
        members: Collection[str],
        registered: Collection[str],
        *,
        me: str | None,
        asked_at: float,
        answered_at: float,
        promised_until: float,
        doubts_s: Mapping[str, float] | None = None,
    ) -> None:
        """A list of all registrations, made at some moment from ``asked_at`` to ``answered_at``.

        ``me`` is our own id among the members, if any.
        ``promised_until``: our own promise as it stands when the answer comes. The store may have made the list at any
        moment in between, so no promise may have been running, or given, in all that time. ``doubts_s``: for
        how long a node's own deadline may still hold when its lease is found absent; 0 unless it is given.
        """
        if self._listed_at is not None and asked_at - self._listed_at >= self._ttl:
            self._absent_since = {}
        self._listed_at = asked_at
        for member in members:
            if member in registered:
                self._absent_since.pop(member, None)
            else:
                self._absent_since.setdefault(member, answered_at)
        none_is_left = not any(member in registered for member in members)
        for member, since in self._absent_since.items():
            by_member = me is not None and asked_at >= promised_until
            after_another = self._ended_at is not None and asked_at - self._ended_at >= self._promise_s
            after_the_limit = none_is_left and asked_at - since >= self._limit
            is_old = asked_at - since >= (doubts_s or {}).get(member, 0.0)
            if member != me and is_old and (by_member or after_another or after_the_limit):
                self.fenced.add(member)
