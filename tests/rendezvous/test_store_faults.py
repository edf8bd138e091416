"""What errors of etcd and gRPC are taken to mean: tables over pure functions."""

from __future__ import annotations

import pytest

from dlaunch.rendezvous.etcd_faults import Fault, Help, error_of, fault_of
from dlaunch.rendezvous.etcd_messages import span, to_bytes, to_text
from dlaunch.rendezvous.etcd_probe import PREFACE, fault_in
from dlaunch.rendezvous.store import StoreError, Trouble


@pytest.mark.parametrize(
    ("code", "details", "trouble", "help_", "maybe_done"),
    [
        # Certainly not done: a write may be sent to another endpoint.
        ("UNAVAILABLE", "etcdserver: no leader", Trouble.NO_QUORUM, Help.ANOTHER_TRY, False),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Trouble.TIMEOUT, Help.ANOTHER_TRY, False),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused (111)",
            Trouble.UNREACHABLE,
            Help.ANOTHER_TRY,
            False,
        ),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Trouble.DENIED, Help.NEW_TOKEN, False),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Trouble.DENIED, Help.NEW_TOKEN, False),
        # Perhaps done.
        ("UNAVAILABLE", "etcdserver: request timed out", Trouble.NO_QUORUM, Help.ANOTHER_TRY, True),
        (
            "UNAVAILABLE",
            "etcdserver: request timed out, possibly due to previous leader failure",
            Trouble.NO_QUORUM,
            Help.ANOTHER_TRY,
            True,
        ),
        ("UNAVAILABLE", "etcdserver: leader changed", Trouble.NO_QUORUM, Help.ANOTHER_TRY, True),
        ("UNAVAILABLE", "Socket closed", Trouble.UNREACHABLE, Help.ANOTHER_TRY, True),
        ("UNAVAILABLE", "keepalive watchdog timeout", Trouble.UNREACHABLE, Help.ANOTHER_TRY, True),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Trouble.TIMEOUT, Help.ANOTHER_TRY, True),
        ("CANCELLED", "RST_STREAM", Trouble.UNREACHABLE, Help.ANOTHER_TRY, True),
        # The cluster has spoken.
        ("PERMISSION_DENIED", "etcdserver: permission denied", Trouble.DENIED, Help.NOTHING, False),
        ("NOT_FOUND", "etcdserver: requested lease not found", Trouble.NO_LEASE, Help.NOTHING, False),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", Trouble.TOO_LARGE, Help.NOTHING, False),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Trouble.OTHER, Help.NOTHING, False),
        ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", Trouble.OTHER, Help.NOTHING, False),
        # Not etcd at all.
        ("UNIMPLEMENTED", "Method not found!", Trouble.WRONG_SERVER, Help.ANOTHER_ENDPOINT, False),
        ("UNKNOWN", "Received http2 header with status: 404", Trouble.WRONG_SERVER, Help.ANOTHER_ENDPOINT, False),
    ],
)
def test_an_error_is_understood(code: str, details: str, trouble: Trouble, help_: Help, maybe_done: bool) -> None:
    fault = fault_of(code, details)
    assert (fault.trouble, fault.help, fault.maybe_done) == (trouble, help_, maybe_done)


def test_the_words_of_a_stranger_fit_into_one_sentence() -> None:
    words = fault_of("UNAVAILABLE", "broken\n\x1b[31mred" + "x" * 10_000).words
    assert words.isprintable()
    assert len(words) < 200


def test_endpoints_with_the_same_trouble_are_told_together() -> None:
    refused = Fault(Trouble.UNREACHABLE, "connection refused")
    error = error_of({"a:1": refused, "b:1": Fault(Trouble.NO_QUORUM, "it has no leader"), "c:1": refused}, within_s=2)
    assert error == StoreError(
        Trouble.NO_QUORUM,
        "etcd has no quorum of its members within 2 s: a:1, c:1: connection refused; b:1: it has no leader.",
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "web server"),
        (b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n", "TLS"),
        (b"\x15\x03\x01\x00\x02\x02\x16", "TLS"),
        (b"SSH-2.0-OpenSSH\r\n", "SSH"),
        (b"220 mail.example.org ESMTP\r\n", "HTTP/2"),
        (b"", "closes"),
        (bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), "no connection came about"),
        (PREFACE, "HTTP/2"),  # an echo
    ],
)
def test_the_first_bytes_tell_who_it_is(said: bytes, words: str) -> None:
    assert words in fault_in(said, False).words


@pytest.mark.parametrize(
    ("key", "prefix", "end", "expected"),
    [
        ("a", False, "", (b"a", b"")),
        ("a", True, "", (b"a", b"b")),
        ("é", True, "", (b"\xc3\xa9", b"\xc3\xaa")),
        ("\U0010ffff", True, "", (b"\xf4\x8f\xbf\xbf", b"\xf4\x8f\xbf\xc0")),
        ("", True, "", (b"\0", b"\0")),
        ("a", True, "c", (b"a", b"c")),
        ("\udcff", True, "", (b"\xff", b"\0")),
    ],
)
def test_a_range_of_keys_is_that_of_etcd(key: str, prefix: bool, end: str, expected: tuple[bytes, bytes]) -> None:
    assert span(key, prefix, end) == expected


def test_a_key_that_is_not_utf_8_survives() -> None:
    assert to_bytes(to_text(b"/\xff\xfe/a")) == b"/\xff\xfe/a"
