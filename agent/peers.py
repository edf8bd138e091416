"""The connections between the agents of a run.

The agent's one loop drives it: each socket is registered with the loop's selector, and the key's ``data`` is what to
call with the descriptor when it is ready; `due_at` says when to call `tick`. Nothing here waits for anybody.

A connection serves both ways, whoever opened it. Only who opened it closes it for idleness.
"""

from __future__ import annotations

import errno
import resource
import selectors
import socket
from collections.abc import Callable
from typing import Any

from dlaunch.addresses import join_host_and_port
from dlaunch.clock import now
from dlaunch.errors import ConfigurationError
from dlaunch.rendezvous.values import Peer

from .peer_connection import Connection, How, message_frame, reach, settle
from .peer_follow import Follow
from .peer_handshake import Connecting, Identity, Listening

BACKLOG = 4096
HANDSHAKE_S = 5.0  # from the first packet to the last proof
IDLE_S = 30.0
LOOK_FOR_IDLE_S = 5.0
MAX_STRANGERS = 64  # that have connected to us and proved nothing yet
HURRIED_S = 1.0  # what a stranger gets when there are so many
MAX_CONNECTIONS = 4096  # or half of the descriptors that this process may have
SPARED_S = 0.5  # when there are too many, one that was used less long ago is not closed
ROOM_SHARE = 8  # then room is made for one in eight at once
PAUSE_S = 0.1  # between looks whether another connection can be taken

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Peers:
    """Talks to other agents of the run, and to nobody else; follows one of them."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        said: Callable[[str, dict[str, Any]], None],
        gone: Callable[[str], None],
    ) -> None:
        self.listener: socket.socket | None = None  # its duplicate is for the guard to hold
        self._selector = selector
        self._said = said
        self._gone = gone
        self._identity: Identity | None = None
        self._strangers: dict[Connection, None] = {}  # no proof yet, the oldest first; those that we opened too
        self._open: dict[Connection, None] = {}
        self._to: dict[Peer, Connection] = {}  # opened by us
        self._of: dict[str, Connection] = {}  # open ones, by the other's node id
        self._follow: Follow | None = None
        self._listening = False
        self._listen_at: float | None = None  # when to look whether we can take connections again
        self._look_for_idle_at: float | None = None
        self._most = _most_connections()

    def open(self, host: str) -> str:
        """Listen on a free port of one address of this host; returns ``host:port``, an IPv6 host in brackets.

        Who connects waits until there is an identity. Raises ConfigurationError where the address is not ours.
        """
        assert self.listener is None
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            family, kind, protocol, _name, place = found[0]
            listener = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        except OSError as error:
            raise _cannot_listen(host, error) from None
        try:
            listener.bind(place)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise _cannot_listen(host, error) from None
        self.listener = listener
        self._set_listening()
        return join_host_and_port(host, listener.getsockname()[1])

    def set_identity(self, token: str, node_id: str) -> None:
        """Who we are from now on. Where that changes, all connections are opened anew under the new name."""
        identity = Identity(token, node_id)
        if identity != self._identity:
            self._identity = identity
            self._drop_all()
            self._set_listening()

    def send(self, peer: Peer, message: dict[str, Any]) -> None:
        """Send a message if the peer can be reached; it may be lost. Raises ValueError where it is too long."""
        frame = message_frame(message)
        if connection := self._of.get(peer.node_id) or self._to.get(peer) or self._connect(peer)[0]:
            connection.send(frame)

    def follow(self, peer: Peer | None) -> None:
        """Keep a connection to this peer, and tell when it is proven to be gone; None: follow nobody."""
        if peer == (self._follow.peer if self._follow else None):
            return
        self._follow = None
        if peer is not None:
            self._follow = Follow(peer, now())
            connection = self._to.get(peer)
            if connection is not None:
                self._follow.trying()
                if connection.node_id is not None:
                    self._follow.opened(connection.node_id)

    def is_connected(self, node_id: str) -> bool:
        """Whether there is a connection to or from this node that has passed the handshake."""
        return node_id in self._of

    def close(self) -> None:
        """Close all, the listener too. From here on others may take us for gone: nothing of ours may live."""
        self._follow = None
        self._identity = None
        self._drop_all()
        self._set_listening()
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    # --- the clock ---------------------------------------------------------------------------------------------------

    @property
    def due_at(self) -> float | None:
        """When (on dlaunch's clock) `tick` should be called; None: not before something else has happened."""
        times = [self._listen_at, self._look_for_idle_at, self._follow.try_at if self._follow else None]
        if self._strangers:
            times.append(next(iter(self._strangers)).made_at + HANDSHAKE_S)
        return min((at for at in times if at is not None), default=None)

    def tick(self, at: float) -> None:
        """Do what is due."""
        self._drop_strangers(at - HANDSHAKE_S)
        if self._look_for_idle_at is not None and self._look_for_idle_at <= at:
            self._drop_idle(at)
        if self._listen_at is not None and self._listen_at <= at:
            self._make_room(at)
        follow = self._follow
        if follow is not None and self._identity and follow.try_at is not None and follow.try_at <= at:
            follow.trying()
            _connection, how = (None, None) if follow.peer in self._to else self._connect(follow.peer)
            if how is not None:
                self._follow_ended(follow, how, was_open=False)

    def _drop_strangers(self, made_before: float) -> None:
        for connection in [each for each in self._strangers if each.made_at <= made_before]:
            connection.end(How.SILENT)

    def _drop_idle(self, at: float) -> None:
        for connection in list(self._to.values()):
            if connection.used_at + IDLE_S <= at and not connection.queued_bytes and not self._is_followed(connection):
                connection.end(How.DROPPED)
        self._look_for_idle_at = at + LOOK_FOR_IDLE_S if self._to else None

    # --- connecting --------------------------------------------------------------------------------------------------

    def _connect(self, peer: Peer) -> tuple[Connection | None, How | None]:
        if self._identity is None:
            return None, How.SILENT
        if self._is_full():
            self._close_least_used(now(), 1)
        sock, how = reach(peer.address)
        if sock is None:
            return None, how
        handshake = Connecting(self._identity)
        connection = self._to[peer] = Connection(sock, self._selector, self, handshake, peer)
        self._strangers[connection] = None
        connection.say(handshake.hello())
        if self._look_for_idle_at is None:
            self._look_for_idle_at = now() + LOOK_FOR_IDLE_S
        return connection, None

    def _accept(self, _fd: int) -> None:
        assert self.listener is not None
        assert self._identity is not None
        if self._is_full() or len(self._strangers) >= MAX_STRANGERS:
            self._pause()
            return
        try:
            sock, _address = self.listener.accept()
        except OSError as error:  # else it was reset while it waited, or another has it: there will be more
            if error.errno in _NO_ROOM:
                self._pause()
            return
        sock.setblocking(False)
        settle(sock)
        self._strangers[Connection(sock, self._selector, self, Listening(self._identity))] = None

    def _is_full(self) -> bool:
        return len(self._strangers) + len(self._open) >= self._most

    def _pause(self) -> None:
        self._listen_at = now() + PAUSE_S
        self._set_listening()

    def _make_room(self, at: float) -> None:
        self._listen_at = None
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop_strangers(at - HURRIED_S)
        if self._is_full():
            self._close_least_used(at, max(1, self._most // ROOM_SHARE))
        if self._is_full() or len(self._strangers) >= MAX_STRANGERS:
            self._listen_at = at + PAUSE_S
        self._set_listening()

    def _close_least_used(self, at: float, most: int) -> None:
        """Close some that rest. Whoever needs one opens it again."""
        resting = [
            each
            for each in self._open
            if each.used_at + SPARED_S <= at and not each.queued_bytes and not self._is_followed(each)
        ]
        for connection in sorted(resting, key=lambda each: each.used_at)[:most]:
            connection.end(How.DROPPED)

    def _set_listening(self) -> None:
        """Take connections, or not: only with an identity, and not while there are too many."""
        wanted = self.listener is not None and self._identity is not None and self._listen_at is None
        if self.listener is not None and wanted != self._listening:
            if wanted:
                self._selector.register(self.listener, selectors.EVENT_READ, self._accept)
            else:
                self._selector.unregister(self.listener)
            self._listening = wanted

    # --- what connections tell ---------------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """The other side has proved that it is of this run."""
        assert connection.node_id is not None
        del self._strangers[connection]
        self._open[connection] = None
        if connection.peer is None:
            self._of.setdefault(connection.node_id, connection)
            return
        if self._is_followed(connection):
            assert self._follow is not None
            if self._follow.opened(connection.node_id):
                self._of[connection.node_id] = connection
                return
            if self._follow.gone:
                self._tell_gone(self._follow)
        elif connection.node_id == connection.peer.node_id:
            self._of[connection.node_id] = connection
            return
        connection.end(How.STRANGE)  # another lives there now: what was to be sent is not for him

    def heard(self, connection: Connection, message: dict[str, Any]) -> None:
        """A message came."""
        assert connection.node_id is not None
        self._said(connection.node_id, message)

    def ended(self, connection: Connection, how: How) -> None:
        """A connection is closed."""
        followed = self._is_followed(connection)
        self._strangers.pop(connection, None)
        self._open.pop(connection, None)
        if connection.node_id is not None and self._of.get(connection.node_id) is connection:
            del self._of[connection.node_id]
        if connection.peer is not None and self._to.get(connection.peer) is connection:
            del self._to[connection.peer]
        if followed and self._follow is not None:
            was_open = connection.node_id == self._follow.peer.node_id
            self._follow_ended(self._follow, how, was_open)

    def _follow_ended(self, follow: Follow, how: How, was_open: bool) -> None:
        follow.ended(how, was_open, now())
        if follow.gone:
            self._tell_gone(follow)

    def _tell_gone(self, follow: Follow) -> None:
        """Told once: nothing is followed from here on."""
        self._follow = None
        self._gone(follow.peer.node_id)

    def _is_followed(self, connection: Connection) -> bool:
        return self._follow is not None and connection.peer == self._follow.peer

    def _drop_all(self) -> None:
        for connection in [*self._strangers, *self._open]:
            connection.end(How.DROPPED)


def _most_connections() -> int:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


def _cannot_listen(host: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"The agent cannot listen for other nodes on {host} ({error.strerror}).",
        "Name an address of this host with --local-addr.",
    )
