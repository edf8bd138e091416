"""How bad the world is: how long things take, and how often they go wrong by themselves."""

from __future__ import annotations

import random
from typing import NamedTuple


class Span(NamedTuple):
    """A range of seconds, from which each case draws its own."""

    least: float
    most: float

    def draw(self, dice: random.Random) -> float:
        """One of them, each as likely as the other."""
        return self.least + (self.most - self.least) * dice.random()


class Weather(NamedTuple):
    """What a run has to live with all the time, beside the faults that are arranged. Chances are from 0 to 1."""

    store: Span = Span(0.001, 0.004)  # one way between an agent and the store
    store_slow: float = 0.0  # chance that it takes `slow` instead
    slow: Span = Span(0.2, 2.0)
    request_lost: float = 0.0
    answer_slow: float = 0.0  # chance that the way back alone takes `slow`
    answer_lost: float = 0.0  # the request was performed, and nobody hears of it
    write_late: float = 0.0  # performed long after its sender has given up
    late: Span = Span(0.5, 12.0)
    expiry_late: Span = Span(0.15, 0.3)  # of a lease that has run out
    watch_lost: float = 0.0  # chance that an event never comes
    watch_doubled: float = 0.0
    watch_slow: float = 0.0
    peer: Span = Span(0.0003, 0.002)  # one way between two agents
    peer_slow: float = 0.0
    peer_lost: float = 0.0
    starter_ready: Span = Span(0.1, 0.5)  # from the start of a starter until it can fork
    spawn: Span = Span(0.005, 0.05)  # from a request to a worker that runs
    stop: Span = Span(0.005, 0.3)  # from a signal to a worker's end
    stubborn: float = 0.0  # chance that a worker does not heed a signal that asks it to end
    sweep: Span = Span(0.002, 0.01)
    death: Span = Span(0.005, 0.2)  # from an agent's death until nothing of its node is left
    victim: Span = Span(0.01, 2.0)  # from the loss of a peer until a worker fails of it
    victim_fails: float = 0.5  # chance that it does, and does not hang


FAIR = Weather()


def draw_weather(dice: random.Random) -> Weather:
    """A weather for one run: fair for one in five, else with a few things wrong at a time, seldom or often."""
    if dice.random() < 0.2:
        return FAIR
    wrong = dice.choice((0.002, 0.01, 0.05, 0.15))

    def sometimes() -> float:
        return wrong if dice.random() < 0.4 else 0.0

    return Weather(
        store=dice.choice((Span(0.0005, 0.002), Span(0.001, 0.01), Span(0.01, 0.2))),
        store_slow=sometimes(),
        slow=dice.choice((Span(0.2, 2.0), Span(0.2, 2.0), Span(1.0, 5.0))),
        answer_slow=dice.choice((0.0, 0.0, 0.05, 0.4)),
        request_lost=sometimes(),
        answer_lost=sometimes(),
        write_late=sometimes(),
        expiry_late=dice.choice((Span(0.0, 0.01), Span(0.15, 0.3), Span(0.15, 3.0))),
        watch_lost=sometimes(),
        watch_doubled=sometimes(),
        watch_slow=sometimes(),
        peer=dice.choice((Span(0.0003, 0.002), Span(0.001, 0.1))),
        peer_slow=dice.choice((0.0, 0.0, 0.05, 0.4)),
        peer_lost=sometimes(),
        starter_ready=dice.choice((Span(0.05, 0.1), Span(0.1, 3.0))),
        spawn=dice.choice((Span(0.005, 0.02), Span(0.01, 0.5))),
        stop=dice.choice((Span(0.001, 0.02), Span(0.01, 2.0))),
        stubborn=dice.choice((0.0, 0.1)),
        death=dice.choice((Span(0.005, 0.05), Span(0.01, 0.8))),
        victim_fails=dice.choice((0.0, 0.5, 1.0)),
    )
