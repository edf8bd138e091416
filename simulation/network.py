"""What agents say to each other directly: ways that are slow, lossy or cut, and connections that tell of a death."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from dlaunch.rendezvous.values import Peer

from .clock import Due, Scheduler
from .story import Story
from .weather import Span, Weather

CONNECT_AGAIN_S = Span(0.05, 0.6)  # between two tries of one that follows
RESENT = 0.5  # chance that what was sent into a cut way arrives when it is mended


class Party(Protocol):
    """An agent process, as the others' sockets see it."""

    node_id: str

    @property
    def place(self) -> int:
        """The number of its host."""

    def is_answering(self) -> bool:
        """Whether it takes part in a handshake: it lives and is not frozen."""

    def is_buried(self) -> bool:
        """Whether it is dead and so is all that it had started: its address refuses connections."""

    def has_kernel(self) -> bool:
        """Whether its host's kernel answers: it has power and is not frozen."""

    def hear_peer(self, node_id: str, message: dict[str, Any]) -> None:
        """A message has arrived at its socket."""

    def hear_gone(self, node_id: str) -> None:
        """The peer that it follows is gone."""


class Network:
    """All ways between hosts."""

    def __init__(self, scheduler: Scheduler, dice: random.Random, weather: Weather, story: Story) -> None:
        self.scheduler, self.dice, self.weather, self.story = scheduler, dice, weather, story
        self.at_address: dict[str, Party] = {}  # who listens there, or was the last to do so
        self.follows: dict[Party, Follow] = {}
        self._cuts: dict[tuple[int, int], int] = {}  # how many faults cut the way between two hosts
        self._slow: dict[tuple[int, int], float] = {}  # what messages between two hosts take
        self.when_cut_or_mended: list[Callable[[], None]] = []
        self._held: list[tuple[Party, str, Peer, dict[str, Any]]] = []

    def is_cut(self, one: int, other: int) -> bool:
        """Whether nothing goes through between two hosts."""
        return bool(self._cuts) and one != other and self._cuts.get(_pair(one, other), 0) > 0

    def cut(self, one: int, other: int) -> None:
        """Silence between two hosts."""
        self._cuts[_pair(one, other)] = self._cuts.get(_pair(one, other), 0) + 1
        self._tell()

    def mend(self, one: int, other: int) -> None:
        """The way is open again, as far as this cut goes; some of what was sent meanwhile arrives now."""
        pair = _pair(one, other)
        left = self._cuts.pop(pair, 0) - 1
        if left > 0:
            self._cuts[pair] = left
        self._tell()
        held, self._held = self._held, []
        for sender, node_id, peer, message in held:
            if self.dice.random() < RESENT:
                self.send(sender, node_id, peer, message)

    def _tell(self) -> None:
        for call in self.when_cut_or_mended:
            call()

    def slow(self, one: int, other: int, delay_s: float) -> None:
        """Messages between two hosts take so long; 0: as ever."""
        self._slow[_pair(one, other)] = delay_s

    def mend_all(self) -> None:
        """All ways are open."""
        for one, other in tuple(self._cuts):
            while self.is_cut(one, other):
                self.mend(one, other)
        self._slow.clear()

    def send(self, sender: Party, node_id: str, peer: Peer, message: dict[str, Any]) -> None:
        """Send a message: it may be lost, and it is not repeated."""
        there = self.at_address.get(peer.address)
        if there is None or there.node_id != peer.node_id:
            return
        if self.is_cut(sender.place, there.place):
            if len(self._held) < 100:
                self._held.append((sender, node_id, peer, message))
        elif not (self.weather.peer_lost and self.dice.random() < self.weather.peer_lost):
            way_s = self.way() + self._slow.get(_pair(sender.place, there.place), 0.0)
            self.scheduler.after(way_s, self._arrive, there, peer.node_id, node_id, message)

    def _arrive(self, there: Party, meant: str, sender: str, message: dict[str, Any]) -> None:
        if there.node_id == meant:
            there.hear_peer(sender, message)

    def way(self) -> float:
        """Seconds that a message takes."""
        slow = self.weather.peer_slow and self.dice.random() < self.weather.peer_slow
        return (self.weather.slow if slow else self.weather.peer).draw(self.dice)

    def follow(self, party: Party, peer: Peer | None) -> None:
        """Keep a connection from a party to a peer, and to no other."""
        if (before := self.follows.pop(party, None)) is not None:
            before.end()
        if peer is not None:
            self.follows[party] = Follow(self, party, peer)

    def any_cut_among(self, hosts: set[int]) -> bool:
        """Whether two of these hosts do not reach each other."""
        return any(one in hosts and other in hosts for one, other in self._cuts)

    def wake_followers(self, there: Party) -> None:
        """The connections to this party are over, and their kernels say so where they can."""
        for follow in tuple(self.follows.values()):
            if follow.target is there and follow.is_connected:
                follow.lose_connection()


class Follow:
    """One party's connection to the peer that it follows."""

    def __init__(self, network: Network, party: Party, peer: Peer) -> None:
        self.target: Party | None = None
        self.is_connected = False
        self._network, self._party, self._peer = network, party, peer
        self._was_connected = False
        self._due: Due | None = network.scheduler.after(network.way(), self._try)

    def end(self) -> None:
        """Follow no longer."""
        if self._due is not None:
            self._due.cancel()

    def lose_connection(self) -> None:
        """The other end was closed, or reset."""
        self.is_connected = False
        self._try_after(self._network.way())

    def _try_after(self, delay_s: float) -> None:
        self.end()
        self._due = self._network.scheduler.after(delay_s, self._try)

    def _try(self) -> None:
        network = self._network
        there = network.at_address.get(self._peer.address)
        again_s = CONNECT_AGAIN_S.draw(network.dice)
        if there is None or not self._can_talk(there):
            self._try_after(again_s)
        elif there.is_answering():
            self._meet(there, again_s)
        elif there.is_buried() and self._was_connected:
            self._report_gone()
        else:
            self._try_after(0.02 if self._was_connected else again_s)

    def _can_talk(self, there: Party) -> bool:
        cut = self._network.is_cut(self._party.place, there.place)
        return self._party.is_answering() and there.has_kernel() and not cut

    def _meet(self, there: Party, again_s: float) -> None:
        if there.node_id == self._peer.node_id:
            self.target, self.is_connected, self._was_connected = there, True, True
        elif self._was_connected:
            self._report_gone()
        else:
            self._try_after(again_s)

    def _report_gone(self) -> None:
        self._network.follows.pop(self._party, None)
        self._party.hear_gone(self._peer.node_id)


def _pair(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)
