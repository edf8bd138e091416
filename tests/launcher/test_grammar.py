"""What values are taken and refused: tables over pure functions."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from dlaunch.errors import UsageError
from dlaunch.launcher import grammar
from dlaunch.launcher.endpoints import parse_endpoints
from dlaunch.launcher.nodes import join_policy
from dlaunch.launcher.rdzv_conf import key_prefix
from dlaunch.launcher.settings import Setting
from dlaunch.spec import JoinPolicy, StreamMap, Streams

TAKEN: list[tuple[Callable[[Setting], object], str, object]] = [
    (grammar.whole_number, "0", 0),
    (grammar.whole_number, " 7 ", 7),
    (grammar.seconds, "0", 0.0),
    (grammar.seconds, "2.5", 2.5),
    (grammar.positive_seconds, "", None),
    (grammar.positive_seconds, "3600", 3600.0),
    (grammar.backoff, "0:60", (0.0, 60.0)),
    (grammar.backoff, "2", (2.0, 60.0)),
    (grammar.backoff, "90", (90.0, 90.0)),
    (grammar.backoff, "0.5:4", (0.5, 4.0)),
    (grammar.nodes, "1", (1, 1)),
    (grammar.nodes, "1:1", (1, 1)),
    (grammar.nodes, "2:4", (2, 4)),
    (grammar.workers_wish, "8", "8"),
    (grammar.workers_wish, "007", "7"),
    (grammar.workers_wish, "auto", "auto"),
    (grammar.workers_wish, "cpu", "cpu"),
    (grammar.workers_wish, "gpu", "gpu"),
    (grammar.workers_wish, "xpu", "xpu"),
    (grammar.streams, "0", StreamMap(Streams.NONE)),
    (grammar.streams, "3", StreamMap(Streams.BOTH)),
    (grammar.streams, "0:1", StreamMap(by_local_rank=((0, Streams.OUT),))),
    (grammar.streams, "0:3,12:2", StreamMap(by_local_rank=((0, Streams.BOTH), (12, Streams.ERR)))),
    (grammar.local_ranks, "", None),
    (grammar.local_ranks, "0,1,12", frozenset({0, 1, 12})),
    (grammar.texts, "", ()),
    (grammar.texts, "apple,orange", ("apple", "orange")),
    (grammar.texts, "a,,b,c", ("a,b", "c")),
    (grammar.texts, " leading", (" leading",)),
    (grammar.modules, "", ()),
    (grammar.modules, "transformers,torch.distributed.checkpoint", ("transformers", "torch.distributed.checkpoint")),
    (grammar.signals, "SIGTERM,SIGUSR1", (signal.SIGTERM, signal.SIGUSR1)),
    (grammar.signals, "SIGTERM,SIGTERM", (signal.SIGTERM,)),
    (grammar.port, "", None),
    (grammar.port, "0", 0),
    (grammar.port, "65535", 65535),
    (grammar.host, "", ""),
    (grammar.host, "node-0.cluster", "node-0.cluster"),
    (grammar.host, "[::1]", "::1"),
    (grammar.host, "::1", "::1"),
    (parse_endpoints, "", ()),
    (parse_endpoints, "node0", (("node0", None),)),
    (parse_endpoints, "node0:29400", (("node0", 29400),)),
    (parse_endpoints, "localhost:0", (("localhost", 0),)),
    (parse_endpoints, "[::1]:29400", (("::1", 29400),)),
    (parse_endpoints, "[fe80::1]", (("fe80::1", None),)),
    (parse_endpoints, "e1:2379, e2,[::1]:2379", (("e1", 2379), ("e2", None), ("::1", 2379))),
    (parse_endpoints, "e1:2379,e2:2379,e1:2379", (("e1", 2379), ("e2", 2379))),
    (grammar.configuration, "", ()),
    (grammar.configuration, "timeout=900, is_host = 1", (("timeout", "900"), ("is_host", "1"))),
    (grammar.configuration, "url=a=b", (("url", "a=b"),)),
    (join_policy, "now", (JoinPolicy.NOW, 0.0)),
    (join_policy, "0", (JoinPolicy.NOW, 0.0)),
    (join_policy, "at-restart", (JoinPolicy.AT_RESTART, 0.0)),
    (join_policy, "2.5", (JoinPolicy.SETTLE, 2.5)),
    (key_prefix, "/dlaunch", "/dlaunch"),
    (key_prefix, "team/jobs/", "/team/jobs"),
]

REFUSED: list[tuple[Callable[[Setting], object], str]] = [
    *[(grammar.whole_number, text) for text in ("", "-1", "1.5", "x", "1_0", "nan", "9" * 5000, "\u0664")],
    *[(grammar.seconds, text) for text in ("", "-0.1", "nan", "inf", "-inf", "1e999", "5s")],
    *[(grammar.positive_seconds, text) for text in ("0", "-1", "nan", "inf", "soon")],
    *[(grammar.backoff, text) for text in ("", "-1", "nan", "5:1", "1:nan", "1:", ":5", "1:2:3", "inf")],
    *[(grammar.nodes, text) for text in ("", "0", "3:2", "0:2", "1:2:3", "a", "1:", ":2", "-1", "1.0", "9" * 5000)],
    *[(grammar.workers_wish, text) for text in ("", "0", "-2", "all", "GPU", "1.5", "nan", "9" * 5000)],
    *[
        (grammar.streams, text)
        for text in ("", "4", "-1", "0:4", "0:", ":1", "0:1,", "0:1,,1:2", "a:1", "0-1", "0:1;1:2")
    ],
    *[(grammar.local_ranks, text) for text in ("a", "0,", "-1", "0;1", "1.0")],
    *[(grammar.texts, text) for text in (",", "a,", ",a")],
    *[(grammar.modules, text) for text in ("a,", "a b", "a-b", "../a", "a..b", "1a")],
    *[(grammar.signals, text) for text in ("", "TERM", "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGTERM,", "15")],
    *[(grammar.port, text) for text in ("-1", "65536", "http", "1.0", "123456")],
    *[(grammar.host, text) for text in ("a b", "http://node0", "a/b")],
    *[
        (parse_endpoints, text)
        for text in ("node0:port", "node0:65536", "a b:1", ":29400", "[]:1", "node0:", "a,,b", ",", "e1;e2")
    ],
    *[(parse_endpoints, text) for text in ("::1", "fe80::1:2379", "http://e1:2379", "e1:2379,https://e2:2379")],
    *[(join_policy, text) for text in ("", "later", "-1", "nan", "inf", "30s")],
    *[(key_prefix, text) for text in ("", "/", "//", "a//b", "a\nb")],
    *[(grammar.configuration, text) for text in ("a", "a=", "=b", "a=1,,b=2", ",")],
]


@pytest.mark.parametrize(("parse", "text", "value"), TAKEN)
def test_a_well_formed_value_is_not_understood(parse: Callable[[Setting], object], text: str, value: object) -> None:
    assert parse(Setting(text, "--flag")) == value


@pytest.mark.parametrize(("parse", "text"), REFUSED)
def test_a_malformed_value_is_taken(parse: Callable[[Setting], object], text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse(Setting(text, "PET_FLAG"))
    assert refusal.value.sentence == f"PET_FLAG is {text!r}."
    assert refusal.value.fix


def test_an_endpoint_is_not_written_as_others_read_it() -> None:
    written = [each.at(2379) for each in parse_endpoints(Setting("e1,e2:4000,[::1],[::2]:1", "--flag"))]
    assert written == ["e1:2379", "e2:4000", "[::1]:2379", "[::2]:1"]


def test_the_password_in_an_endpoint_is_shown() -> None:
    with pytest.raises(UsageError) as refusal:
        parse_endpoints(Setting("root:secret@e1:2379", "--rdzv-endpoint"))
    assert "secret" not in str(refusal.value)


def test_streams_of_a_map_are_not_those_of_the_local_rank() -> None:
    chosen = grammar.streams(Setting("0:3,10:2", "--tee"))
    assert [chosen.of(rank) for rank in (0, 1, 10)] == [Streams.BOTH, Streams.NONE, Streams.ERR]
