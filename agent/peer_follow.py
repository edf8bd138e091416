"""Following one peer: when to try again, and what proves that it is gone. Pure: it takes what happened and the time.

[Note: what proves that a peer is gone]
Once a connection to the peer's address has been established, so that the address is known to lead to it, its end
followed by one of these is proof that the agent is dead *and* that nothing it started is left:

- the host refuses a new connection to that address. The node's guard holds the listening socket too, until the last
  process below it is dead (worker/guard.py); a connection that it lets wait is reset when the guard ends, and so is
  tried again at once;
- the address answers, with the run's token, as another node id. A node id is taken anew only when no worker of the old
  one is left, and an address that can be bound again has been let go by the guard.

Silence, lack of a route, a stranger at the address, a refusal that a router or a firewall sends by ICMP: they prove
nothing. What forges the reset of the host itself (a firewall told to "reject with tcp-reset", in the middle of a
partition) cannot be told from it.
"""

from __future__ import annotations

from dlaunch.rendezvous.values import Peer

from .peer_connection import How

FIRST_DELAY_S = 0.2
LAST_DELAY_S = 1.0


class Follow:
    """One peer that is followed."""

    def __init__(self, peer: Peer, at: float) -> None:
        self.peer = peer
        self.try_at: float | None = at  # when to connect; None: connected, connecting, or done
        self.gone = False
        self._established = False
        self._delay_s = FIRST_DELAY_S
        self._reset_before = False  # the attempt before was reset too
        self._lost_at = float("-inf")  # when an established connection ended last

    def trying(self) -> None:
        """An attempt to connect begins."""
        self.try_at = None

    def opened(self, node_id: str) -> bool:
        """Somebody of the run answered. Whether the peer is to be kept connected to: else it is gone or not known."""
        if node_id == self.peer.node_id:
            self._established = True
            self._reset_before = False
            self._delay_s = FIRST_DELAY_S
            return True
        self.gone = self._established
        return False

    def ended(self, how: How, was_open: bool, at: float) -> None:
        """The connection, or the attempt to have one, ended."""
        if self._established and how is How.REFUSED:
            self.gone = True
        if self.gone:
            self.try_at = None
        elif self._at_once(how, was_open, at):
            self.try_at = at
        else:
            self.try_at = at + self._delay_s
            self._delay_s = min(2 * self._delay_s, LAST_DELAY_S)

    def _at_once(self, how: How, was_open: bool, at: float) -> bool:
        """Whether what ended is news; what ends so again and again is tried after a delay, as all else is."""
        if was_open:
            lost_before, self._lost_at = self._lost_at, at
            return at - lost_before >= FIRST_DELAY_S
        reset_before, self._reset_before = self._reset_before, how is How.CLOSED
        return self._reset_before and not reset_before
