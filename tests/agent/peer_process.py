"""An agent process that talks to its peers, and tells on stdout what it hears, a JSON array a line.

``python -m tests.agent.peer_process HOST NODE_ID [FOLLOWED_NODE_ID FOLLOWED_ADDRESS]``; with GUARDED=script in the
environment, a guard holds its listening socket while a worker runs the script; with SHORT_TIMES=1 silence is noticed
in a moment.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys

from dlaunch import frames
from dlaunch.agent import peer_connection
from dlaunch.agent import peers as peers_module
from dlaunch.agent.peers import Peers
from dlaunch.clock import now
from dlaunch.rendezvous.values import Peer
from tests.worker.driver import Driver


def tell(*what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    host, node_id, *followed = sys.argv[1:]
    if "SHORT_TIMES" in os.environ:
        peers_module.HANDSHAKE_S = 0.3
        peer_connection.UNACKNOWLEDGED_MS = 300
        peer_connection.KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 1))
    selector = selectors.DefaultSelector()
    peers = Peers(selector, lambda sender, message: tell("said", sender, message), lambda peer: tell("gone", peer))
    address = peers.open(host)
    peers.set_identity("secret", node_id)
    below = start_guarded(peers, os.environ["GUARDED"]) if "GUARDED" in os.environ else []
    tell("address", address, below)
    if followed:
        peer = Peer(*followed)
        peers.follow(peer)
        peers.send(peer, {"hello": "there"})
    connected = False
    while True:
        if followed and peers.is_connected(followed[0]) != connected:
            connected = not connected
            tell("connected", connected)
        timeout = None if peers.due_at is None else max(0.0, peers.due_at - now())
        for key, _mask in selector.select(timeout):
            if selector.get_map().get(key.fd) is key:
                key.data(key.fd)
        peers.tick(now())


def start_guarded(peers: Peers, script: str) -> list[int]:
    assert peers.listener
    driver = Driver("exec", [sys.executable, "-u", script])
    frames.send(driver.guard_socket, {"kind": "hold"}, [peers.listener.fileno()])
    worker = driver.spawn()
    worker.out.lines(1)
    KEPT.append(driver)
    return [driver.starter_says("started", worker.id)["pid"], driver.starter_pid, driver.guard.pid]


KEPT: list[Driver] = []

if __name__ == "__main__":
    main()
