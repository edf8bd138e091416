"""Real sockets between agents: messages, hostile strangers, and the proof that a peer is gone."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from dlaunch import frames
from dlaunch.agent import peer_connection, peers
from dlaunch.agent.peer_handshake import Connecting, Identity
from dlaunch.agent.peers import Peers
from dlaunch.errors import ConfigurationError
from dlaunch.rendezvous.values import Peer

from .peer_world import PATIENCE_S, TOKEN, Node, Process, for_a_while, until


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Node:
            made = Node(*args, **options)
            stack.callback(made.close)
            return made

        yield make


def heard(node: Node, sender: str, message: dict[str, Any]) -> bool:
    return (sender, message) in node.said


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_messages_arrive_in_order_with_the_senders_node_id_over_one_connection(
    node: Callable[..., Node], host: str
) -> None:
    anna, bert = node("anna", host=host), node("bert", host=host)
    assert anna.peer.address.startswith("[::1]:" if host == "::1" else "127.0.0.1:")
    for number in range(100):
        anna.peers.send(bert.peer, {"number": number})
    until(lambda: len(bert.said) == 100, anna, bert)
    assert bert.said == [("anna", {"number": number}) for number in range(100)]
    bert.peers.send(anna.peer, {"answer": "\u00fc"})  # over the same connection
    until(lambda: anna.said, anna, bert)
    assert anna.said == [("bert", {"answer": "\u00fc"})]
    assert (anna.sockets, bert.sockets) == (1, 1)


def test_a_long_message_passes_and_a_longer_one_is_the_callers_mistake(node: Callable[..., Node]) -> None:
    anna, bert = node("anna"), node("bert")
    long = {"text": "x" * (peer_connection.MAX_MESSAGE_BYTES - 100)}
    anna.peers.send(bert.peer, long)
    until(lambda: bert.said, anna, bert)
    assert bert.said == [("anna", long)]
    with pytest.raises(ValueError, match="exceeds"):
        anna.peers.send(bert.peer, {"text": "x" * peer_connection.MAX_MESSAGE_BYTES})


def test_what_is_said_before_there_is_an_identity_waits_with_who_connects(node: Callable[..., Node]) -> None:
    anna, bert = node("anna"), Node.__new__(Node)
    bert.selector, bert.said, bert.gone = selectors.DefaultSelector(), [], []
    bert.peers = Peers(bert.selector, lambda sender, message: bert.said.append((sender, message)), bert.gone.append)
    bert.peer = Peer("bert", bert.peers.open("127.0.0.1"))
    anna.peers.send(bert.peer, {})
    for_a_while(0.1, anna, bert)
    assert bert.said == []
    bert.peers.set_identity(TOKEN, "bert")
    until(lambda: bert.said, anna, bert)
    bert.close()


def test_a_message_for_one_is_not_given_to_another_who_has_the_address_now(node: Callable[..., Node]) -> None:
    anna, bert = node("anna"), node("bert")
    anna.peers.send(Peer("before bert", bert.peer.address), {"for": "another"})
    until(lambda: anna.sockets == 0 and bert.sockets == 0, anna, bert)
    anna.peers.send(bert.peer, {"for": "bert"})
    until(lambda: bert.said, anna, bert)
    assert bert.said == [("anna", {"for": "bert"})]


@pytest.mark.parametrize("address", ["", "nonsense", "localhost:1", "127.0.0.1:99999", "127.0.0.1:x", "[::1:5", "::1"])
def test_an_address_that_is_none_is_lost_without_a_sound(node: Callable[..., Node], address: str) -> None:
    anna = node("anna")
    anna.peers.send(Peer("bert", address), {})
    anna.peers.follow(Peer("bert", address))
    for_a_while(0.05, anna)
    assert anna.gone == []


def test_a_new_identity_is_what_others_meet_from_then_on(node: Callable[..., Node]) -> None:
    anna, bert = node("anna"), node("bert")
    anna.peers.follow(bert.peer)
    anna.peers.send(bert.peer, {"number": 1})
    until(lambda: bert.said, anna, bert)
    bert.peers.set_identity(TOKEN, "bert again")
    until(lambda: anna.gone, anna, bert)
    assert anna.gone == ["bert"]
    bert.peers.send(anna.peer, {})
    until(lambda: anna.said, anna, bert)
    assert anna.said == [("bert again", {})]


def test_idle_connections_are_closed_and_opened_again_on_demand(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "IDLE_S", 0.1)
    monkeypatch.setattr(peers, "LOOK_FOR_IDLE_S", 0.05)
    anna, bert, carl = node("anna"), node("bert"), node("carl")
    anna.peers.follow(carl.peer)  # what is followed is not closed
    for number in range(3):
        anna.peers.send(bert.peer, {"number": number})
        until(partial(heard, bert, "anna", {"number": number}), anna, bert, carl)
        until(lambda: bert.sockets == 0, anna, bert, carl)
    assert (anna.sockets, carl.sockets) == (1, 1)
    assert anna.gone == []


def test_a_peer_that_does_not_read_costs_a_bounded_memory_and_no_time(node: Callable[..., Node]) -> None:
    anna, bert = node("anna"), node("bert")
    anna.peers.send(bert.peer, {})
    until(lambda: bert.said, anna, bert)
    message = {"text": "x" * 500_000}
    for _ in range(100):
        anna.peers.send(bert.peer, message)
        anna.step(0.0)
    assert 0 < anna.selector.get_key(anna.connection()).data.__self__.queued_bytes <= peer_connection.MAX_QUEUED_BYTES
    until(lambda: len(bert.said) > 2, anna, bert)


def test_an_address_that_is_not_of_this_host_is_told_with_the_flag() -> None:
    peers = Peers(selectors.DefaultSelector(), lambda *_: None, lambda _: None)
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1.*--local-addr"):
        peers.open("192.0.2.1")


# --- strangers -------------------------------------------------------------------------------------------------------


def frame(document: object) -> bytes:
    body = json.dumps(document).encode()
    return struct.pack(">I", len(body)) + body


HELLO = Connecting(Identity(TOKEN, "eve")).hello()
HOSTILE = {
    "random bytes": os.urandom(5000),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a frame that claims to be huge": struct.pack(">I", 0xFFFFFFFF),
    "a frame longer than a handshake's": struct.pack(">I", 5000) + b" " * 5000,
    "no JSON": struct.pack(">I", 4) + b"abcd",
    "an empty frame": struct.pack(">I", 0),
    "JSON nested deeply": struct.pack(">I", 4000) + b"[" * 4000,
    "a long number": struct.pack(">I", 4090) + b'{"kind":' + b"1" * 4081 + b"}",
    "an array": frame([1]),
    "no kind": frame({"a": 1}),
    "a kind that is no text": frame({"kind": {}}),
    "a message without a handshake": frame({"kind": "message", "message": {}}),
    "a proof without a hello": frame({"kind": "proof", "proof": "0" * 64}),
    "two hellos": frame(HELLO) * 2,
    "a proof that is wrong": frame(HELLO) + frame({"kind": "proof", "proof": "0" * 64}),
    "a proof of another type": frame(HELLO) + frame({"kind": "proof", "proof": 7}),
    "a message in place of the proof": frame(HELLO) + frame({"kind": "message", "message": {}}),
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE.keys())
def test_who_does_not_prove_to_be_of_the_run_is_dropped_and_nothing_else_happens(
    node: Callable[..., Node], sent: bytes
) -> None:
    anna, bert = node("anna"), node("bert")
    host, port = bert.peer.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as eve:
        eve.sendall(sent)
        until(lambda: bert.sockets == 1, bert)
        until(lambda: bert.sockets == 0, bert)
        with suppress(ConnectionResetError):
            eve.settimeout(PATIENCE_S)
            while eve.recv(1000):
                pass
    anna.peers.send(bert.peer, {"still": "here"})
    until(lambda: bert.said, anna, bert)
    assert bert.said == [("anna", {"still": "here"})]


def test_a_run_of_another_token_is_dropped_by_both_sides(node: Callable[..., Node]) -> None:
    anna, eve = node("anna"), node("eve", token="another")
    eve.peers.send(anna.peer, {})
    anna.peers.send(eve.peer, {})
    until(lambda: anna.sockets and eve.sockets, anna, eve)
    until(lambda: anna.sockets == 0 and eve.sockets == 0, anna, eve)
    assert anna.said == eve.said == []


@contextmanager
def proven(bert: Node) -> Iterator[socket.socket]:
    """A connection of one who knows the token, after the handshake."""
    host, port = bert.peer.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as carl:
        connecting = Connecting(Identity(TOKEN, "carl"))
        frames.send(carl, connecting.hello())
        carl.setblocking(False)
        until(lambda: bert.sockets == 1, bert)
        until(lambda: select.select([carl], [], [], 0)[0], bert)
        carl.settimeout(PATIENCE_S)
        received = frames.receive(carl)
        assert received
        frames.send(carl, connecting.hear(received[0])[1])
        yield carl


@pytest.mark.parametrize(
    "sent",
    [
        frame({"kind": "other"}),
        frame({"kind": "message"}),
        frame({"kind": "message", "message": [1]}),
        struct.pack(">I", peer_connection.MAX_MESSAGE_BYTES + 1),
        struct.pack(">I", 1_000_000) + b"[" * 1_000_000,
    ],
    ids=["another kind", "no message", "an array", "too long", "nested deeply"],
)
def test_a_peer_that_breaks_the_form_after_the_handshake_is_dropped_too(node: Callable[..., Node], sent: bytes) -> None:
    bert = node("bert")
    with proven(bert) as carl:
        carl.setblocking(False)
        carl.sendall(frame({"kind": "message", "message": {"fine": 1}}))
        until(lambda: bert.said, bert)
        while sent and bert.sockets:
            with suppress(BlockingIOError, ConnectionResetError, BrokenPipeError):
                sent = sent[carl.send(sent) :]
            bert.step(0.0)
        until(lambda: bert.sockets == 0, bert)
    assert bert.said == [("carl", {"fine": 1})]


def test_a_message_that_is_cut_short_by_the_end_is_not_heard(node: Callable[..., Node]) -> None:
    bert = node("bert")
    with proven(bert) as carl:
        carl.sendall(frame({"kind": "message", "message": {"fine": 1}})[:-1])
    until(lambda: bert.sockets == 0, bert)
    assert bert.said == []


def test_who_says_nothing_is_dropped_after_a_while(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HANDSHAKE_S", 0.1)
    anna, bert = node("anna"), node("bert")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host, port = bert.peer.address.rsplit(":", 1)
        with socket.create_connection((host, int(port))):
            anna.peers.send(Peer("mute", f"127.0.0.1:{mute.getsockname()[1]}"), {})
            until(lambda: anna.sockets == bert.sockets == 1, anna, bert)
            until(lambda: anna.sockets == bert.sockets == 0, anna, bert)


def test_many_who_say_nothing_keep_nobody_out(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HURRIED_S", 0.2)
    monkeypatch.setattr(peers, "MAX_STRANGERS", 8)
    anna, bert = node("anna"), node("bert")
    host, port = bert.peer.address.rsplit(":", 1)
    with ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(socket.create_connection((host, int(port))))
        until(lambda: bert.sockets >= 8, bert)
        for_a_while(0.05, bert)
        assert bert.sockets <= 8
        anna.peers.send(bert.peer, {})
        until(lambda: bert.said, anna, bert)


def test_there_are_no_more_connections_than_the_bound_and_the_least_used_makes_room(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(peers, "SPARED_S", 0.05)
    bert = node("bert")
    others = [node(f"node {number}") for number in range(8)]
    for other in others:
        other.peers.send(bert.peer, {})
        until(partial(heard, bert, other.peer.node_id, {}), bert, other)
        assert bert.sockets <= 5  # the listener may be out of the selector meanwhile


# --- the proof -------------------------------------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    with ExitStack() as stack:

        def start(*arguments: str, **options: Any) -> Process:
            started = Process(*arguments, **options)
            stack.callback(started.end)
            return started

        yield start


def test_a_killed_peer_is_gone_at_once(node: Callable[..., Node], process: Callable[..., Process]) -> None:
    anna, bert = node("anna"), process("127.0.0.1", "bert")
    anna.peers.follow(bert.peer)
    anna.peers.send(bert.peer, {})
    until(bert.has_told, anna)
    killed_at = monotonic()
    bert.signal(signal.SIGKILL)
    until(lambda: anna.gone, anna)
    assert anna.gone == ["bert"]
    assert monotonic() - killed_at < PATIENCE_S / 2
    for_a_while(0.3, anna)
    assert anna.gone == ["bert"]  # told once
    assert anna.sockets == 0


def test_a_killed_peer_is_gone_only_when_its_guard_has_killed_its_workers(
    node: Callable[..., Node], process: Callable[..., Process], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(1)\nsignal.pause()\n")
    anna, bert = node("anna"), process("127.0.0.1", "bert", GUARDED=str(script))
    worker, starter, _guard = bert.below
    anna.peers.follow(bert.peer)
    anna.peers.send(bert.peer, {})
    until(bert.has_told, anna)
    os.kill(starter, signal.SIGSTOP)  # the guard has patience with it, for two seconds
    bert.signal(signal.SIGKILL)
    saw_it_alive = False
    while not anna.gone:
        saw_it_alive = saw_it_alive or (not anna.peers.is_connected("bert") and Path(f"/proc/{worker}").exists())
        anna.step(0.005)
    assert saw_it_alive
    assert not any(Path(f"/proc/{pid}").exists() for pid in (worker, starter))
    assert anna.gone == ["bert"]


def test_a_peer_that_is_stopped_is_not_gone_and_goes_on_later(
    node: Callable[..., Node], process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "HANDSHAKE_S", 0.2)
    anna, bert = node("anna"), process("127.0.0.1", "bert")
    anna.peers.follow(bert.peer)
    until(lambda: anna.peers.is_connected("bert"), anna)
    bert.signal(signal.SIGSTOP)
    anna.connection().shutdown(socket.SHUT_RDWR)  # as something in between may do
    for_a_while(1.0, anna)
    assert not anna.peers.is_connected("bert")
    assert anna.gone == []
    bert.signal(signal.SIGCONT)
    until(lambda: anna.peers.is_connected(bert.peer.node_id), anna)
    bert.signal(signal.SIGKILL)
    until(lambda: anna.gone, anna)


def test_a_stranger_at_the_address_of_a_peer_proves_nothing(node: Callable[..., Node]) -> None:
    anna, bert = node("anna"), Node("bert")
    assert bert.peers.listener
    bert.peers.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that the stranger need not wait
    anna.peers.follow(bert.peer)
    until(lambda: anna.peers.is_connected("bert"), anna, bert)
    bert.close()
    with socket.create_server(("127.0.0.1", int(bert.peer.address.rsplit(":", 1)[1]))) as stranger:
        stranger.setblocking(False)
        visits = 0
        deadline = monotonic() + PATIENCE_S
        while visits < 3:
            assert monotonic() < deadline
            anna.step(0.01)
            with suppress(BlockingIOError), stranger.accept()[0] as accepted:
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                visits += 1
        assert anna.gone == []
    until(lambda: anna.gone, anna)


def test_a_peer_that_was_never_reached_is_not_gone_by_a_refusal(node: Callable[..., Node]) -> None:
    anna, bert = node("anna"), Node("bert")
    bert.close()
    anna.peers.follow(bert.peer)
    for_a_while(0.7, anna)
    assert anna.gone == []


def test_who_is_followed_no_longer_is_not_told_of(node: Callable[..., Node]) -> None:
    anna, bert, carl = node("anna"), Node("bert"), node("carl")
    anna.peers.follow(bert.peer)
    until(lambda: anna.peers.is_connected("bert"), anna, bert)
    anna.peers.follow(carl.peer)
    until(lambda: anna.peers.is_connected("carl"), anna, bert, carl)
    bert.close()
    for_a_while(0.3, anna, carl)
    assert anna.gone == []
