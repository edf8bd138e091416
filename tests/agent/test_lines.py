"""Whatever the bytes, and wherever they are cut, the console gets whole lines, and every one of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlaunch.agent.lines import ConsoleLines, WholeLines, with_prefix

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

NEVER = -1.0  # a time at which no update is due
QUARTERS = st.integers(4, 80).map(lambda quarters: quarters / 4)  # of a second, exact in floating point
PIECES = st.sampled_from(
    [b"a", b"bc", b" ", b"\n", b"\n\n", b"\r", b"\r\n", b"\0", b"\xff\xfe", b"\xc3", b"\x1b[A", b"\x1b[1m"]
)
TEXT = st.lists(PIECES | st.binary(max_size=8), max_size=40).map(b"".join)
PLAIN = TEXT.map(lambda text: text.replace(b"\r", b"."))


@st.composite
def chunked(draw: st.DrawFn, texts: st.SearchStrategy[bytes]) -> list[bytes]:
    """A text, cut anywhere."""
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def shown(chunks: Iterable[bytes], at: float = NEVER, lines: ConsoleLines | None = None) -> bytes:
    lines = lines or ConsoleLines()
    return b"".join([*(lines.feed(chunk, at) for chunk in chunks), lines.finish()])


def ended(text: bytes) -> bytes:
    return text if not text or text.endswith(b"\n") else text + b"\n"


@unhurried
@given(chunked(PLAIN))
def test_text_without_carriage_returns_comes_out_as_it_went_in(chunks: list[bytes]) -> None:
    assert shown(chunks) == ended(b"".join(chunks))


@unhurried
@given(chunked(TEXT))
def test_what_is_shown_does_not_depend_on_where_the_stream_was_cut(chunks: list[bytes]) -> None:
    assert shown(chunks) == shown([b"".join(chunks)])


@unhurried
@given(chunked(TEXT), st.lists(QUARTERS, max_size=13).map(sorted))
def test_no_ordinary_line_is_lost_or_moved_while_a_bar_is_shown(chunks: list[bytes], times: list[float]) -> None:
    lines = ConsoleLines()
    times += [20.0] * (len(chunks) - len(times))
    seen = [
        piece for chunk, at in zip(chunks, times, strict=False) for piece in (lines.feed(chunk, at), lines.update(at))
    ]
    output = b"".join([*seen, lines.finish()])
    assert output == ended(output)
    left = iter(output.split(b"\n"))
    for line in b"".join(chunks).split(b"\n")[:-1]:
        if b"\r" not in line.rstrip(b"\r"):
            assert any(line.rstrip(b"\r") == candidate.rstrip(b"\r") for candidate in left), line


@unhurried
@given(chunked(TEXT), st.lists(QUARTERS, max_size=13).map(sorted))
def test_updates_are_at_least_a_second_apart(chunks: list[bytes], times: list[float]) -> None:
    lines = ConsoleLines()
    moments = []
    for chunk, at in zip(chunks, times, strict=False):
        lines.feed(chunk, NEVER)
        if lines.update(at):
            moments.append(at)
    assert all(later - earlier >= 1 for earlier, later in pairwise(moments))


@unhurried
@given(chunked(PLAIN), st.integers(1, 6))
def test_a_line_that_is_too_long_is_cut_at_fixed_places(chunks: list[bytes], longest: int) -> None:
    lines = WholeLines(longest)
    output = b"".join(lines.feed(chunk) for chunk in chunks) + lines.take()
    again = WholeLines(longest)
    assert output == again.feed(b"".join(chunks)) + again.take()
    assert all(len(line) <= longest for line in output.split(b"\n"))
    assert output.replace(b"\n", b"") == b"".join(chunks).replace(b"\n", b"")


def test_the_pieces_of_a_long_line_are_exactly_as_long_as_allowed() -> None:
    lines = WholeLines(4)
    assert lines.feed(b"ab") + lines.feed(b"cdefghij\nk\n") == b"abcd\nefgh\nij\nk\n"


@unhurried
@given(chunked(PLAIN), st.sampled_from([b"0:1 ", b"[default0]:", b"\n", b""]))
def test_every_line_has_its_prefix(chunks: list[bytes], prefix: bytes) -> None:
    lines = ConsoleLines()
    blocks = [*(lines.feed(chunk, NEVER) for chunk in chunks), lines.finish()]
    expected = b"".join(prefix + line + b"\n" for line in ended(b"".join(chunks)).split(b"\n")[:-1])
    assert b"".join(with_prefix(block, prefix) for block in blocks) == expected


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"a\rb\rc\n", b"c\n"),
        (b"a\rb\rc", b"c\n"),
        (b"a\rb\r", b"b\n"),
        (b"\r 0%\r 50%\r100%\r\n", b"100%\n"),
        (b"windows\r\nlines\r\n", b"windows\r\nlines\r\n"),
        (b"\r\n\r\r\n", b"\r\n\r\r\n"),
        (b"\r 99%\r     \rdone\n", b"done\n"),
        (b"\r 99%\r     \r", b" 99%\n"),
        (b"\r 99%\r     \r\n", b" 99%\n"),
        (b"\r     \r", b""),
        (b"\r 5%INFO a log line after a bar\n", b" 5%INFO a log line after a bar\n"),
        (b"\router 0%\n\rinner 0%\x1b[A\n\rinner 9%\x1b[A\router 1%\n", b"outer 0%\nouter 1%\n"),
        (b"\rinner 0%\x1b[A\n\rinner 9%\x1b[A", b"inner 9%\n"),
        (b"\x1b[A\n", b"\x1b[A\n"),
        (b"", b""),
        (b"\n", b"\n"),
        (b"x", b"x\n"),
    ],
)
def test_the_last_text_of_a_line_is_what_is_shown(stream: bytes, expected: bytes) -> None:
    assert shown([stream]) == expected
    assert shown(stream[i : i + 1] for i in range(len(stream))) == expected


def test_a_bar_shows_its_first_state_at_once_and_then_one_a_second() -> None:
    lines = ConsoleLines()
    output = []
    for tenth in range(35):
        at = 1 + tenth / 10
        output += [lines.feed(b"\r%d%%" % tenth, at), lines.update(at)]
    assert [text for text in output if text] == [b"0%\n", b"9%\n", b"19%\n", b"29%\n"]
    assert lines.feed(b"\n", 5.0) + lines.finish() == b"34%\n"


def test_a_bar_that_stands_still_gets_its_last_state_shown_when_its_second_is_over() -> None:
    lines = ConsoleLines()
    lines.feed(b"1%\r2%\r", 10.0)
    assert lines.due_at is not None
    assert lines.due_at > 10.0
    assert lines.update(lines.due_at) == b"2%\n"
    assert lines.due_at is None


def test_a_state_that_was_shown_is_not_shown_again_by_the_newline() -> None:
    lines = ConsoleLines()
    assert lines.feed(b"\r100%", 1.0) + lines.update(1.0) == b"100%\n"
    assert lines.feed(b"\n", 1.1) + lines.finish() == b""


def test_a_bar_that_is_painted_again_as_it_was_is_not_shown_again() -> None:
    lines = ConsoleLines()
    assert lines.feed(b"\r50%", 1.0) + lines.update(1.0) == b"50%\n"
    assert lines.feed(b"\r50%", 3.0) + lines.update(3.0) == b""


def test_nothing_is_due_when_no_bar_runs() -> None:
    lines = ConsoleLines()
    lines.feed(b"text\nand a prompt: ", 1.0)
    assert lines.due_at is None
    assert lines.update(100.0) == b""
