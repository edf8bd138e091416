"""How two agents prove to each other that they are of one run: a pure exchange of three frames.

The one that connects sends ``hello`` (who it is, a nonce); the one that listens answers ``answer`` (who it is, a nonce
of its own, a proof); the first sends ``proof``. A proof is HMAC-SHA256 under the run's token of who proves (the role),
both node ids and both nonces. So the token is never sent, nothing that was recorded can be used again, and nothing
that one side says can be sent back to it as its own proof. What follows is neither encrypted nor signed: who can
change packets on the way can do what he likes, as with the traffic of the workers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any, NamedTuple

MAX_NODE_ID = 256  # characters
_NONCE_BYTES = 32
_HEX = frozenset("0123456789abcdef")
_PROTOCOL = "dlaunch peers 1"

Frame = dict[str, Any]


class Identity(NamedTuple):
    """Who we are to our peers, and what proves it."""

    token: str
    node_id: str

    def __repr__(self) -> str:
        return f"Identity(node_id={self.node_id!r})"  # the token is a secret


class HandshakeError(Exception):
    """The other side did not prove that it is of this run, or broke the form."""


class Connecting:
    """The side that connects."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._nonce = secrets.token_hex(_NONCE_BYTES)

    def hello(self) -> Frame:
        """The first frame."""
        return {"kind": "hello", "node": self._identity.node_id, "nonce": self._nonce}

    def hear(self, frame: Frame) -> tuple[str, Frame]:
        """The node id of who answered, which is proven now, and the last frame. Raises HandshakeError."""
        _expect(frame, "answer")
        node_id, nonce = _node_id(frame), _hex(frame, "nonce")
        told = (self._identity.node_id, node_id, self._nonce, nonce)
        _check(_hex(frame, "proof"), _proof(self._identity.token, "listener", *told))
        return node_id, {"kind": "proof", "proof": _proof(self._identity.token, "connector", *told)}


class Listening:
    """The side that was connected to."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._nonce = secrets.token_hex(_NONCE_BYTES)
        self._told: tuple[str, str, str, str] | None = None

    def hear(self, frame: Frame) -> tuple[str | None, Frame | None]:
        """The node id of who connected, once it is proven, and a frame to answer with. Raises HandshakeError."""
        if self._told is None:
            _expect(frame, "hello")
            node_id, nonce = _node_id(frame), _hex(frame, "nonce")
            self._told = (node_id, self._identity.node_id, nonce, self._nonce)
            proof = _proof(self._identity.token, "listener", *self._told)
            return None, {"kind": "answer", "node": self._identity.node_id, "nonce": self._nonce, "proof": proof}
        _expect(frame, "proof")
        _check(_hex(frame, "proof"), _proof(self._identity.token, "connector", *self._told))
        return self._told[0], None


def _proof(token: str, role: str, connector: str, listener: str, connectors_nonce: str, listeners_nonce: str) -> str:
    text = json.dumps([_PROTOCOL, role, connector, listener, connectors_nonce, listeners_nonce])
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def _check(given: str, right: str) -> None:
    if not hmac.compare_digest(given.encode(), right.encode()):
        raise HandshakeError("the proof is wrong")


def _expect(frame: Frame, kind: str) -> None:
    if frame.get("kind") != kind:
        raise HandshakeError(f"not a frame of kind {kind}")


def _node_id(frame: Frame) -> str:
    node_id = frame.get("node")
    if not isinstance(node_id, str) or not 0 < len(node_id) <= MAX_NODE_ID:
        raise HandshakeError("no node id")
    return node_id


def _hex(frame: Frame, field: str) -> str:
    value = frame.get(field)
    if not isinstance(value, str) or len(value) != 2 * _NONCE_BYTES or not _HEX.issuperset(value):
        raise HandshakeError(f"no {field}")
    return value
