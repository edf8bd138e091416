"""The handshake as a pure exchange: who is let in, and who is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlaunch.agent.peer_handshake import Connecting, Frame, HandshakeError, Identity, Listening

ANNA, BERT = Identity("secret", "anna"), Identity("secret", "bert")


def recorded(connecting: Connecting, listening: Listening) -> list[Frame]:
    """The three frames of a handshake that succeeds."""
    hello = connecting.hello()
    _, answer = listening.hear(hello)
    assert answer is not None
    _, proof = connecting.hear(answer)
    return [hello, answer, proof]


def test_both_sides_learn_who_the_other_is_and_the_token_is_not_sent() -> None:
    connecting, listening = Connecting(ANNA), Listening(BERT)
    nobody, answer = listening.hear(connecting.hello())
    assert nobody is None
    assert answer is not None
    bert, proof = connecting.hear(answer)
    assert bert == "bert"
    assert listening.hear(proof) == ("anna", None)
    assert "secret" not in f"{connecting.hello()}{answer}{proof}{ANNA!r}"


def test_a_listener_without_the_token_is_found_out() -> None:
    connecting = Connecting(ANNA)
    _, answer = Listening(Identity("guess", "bert")).hear(connecting.hello())
    assert answer is not None
    with pytest.raises(HandshakeError):
        connecting.hear(answer)


def test_a_connector_without_the_token_is_found_out() -> None:
    listening, connecting = Listening(BERT), Connecting(Identity("guess", "anna"))
    _, answer = listening.hear(connecting.hello())
    assert answer is not None
    with pytest.raises(HandshakeError):
        listening.hear({**answer, "kind": "proof"})  # it can only send back what it has heard


def test_what_was_recorded_is_worth_nothing_the_next_time() -> None:
    hello, answer, proof = recorded(Connecting(ANNA), Listening(BERT))
    listening = Listening(BERT)
    listening.hear(hello)
    with pytest.raises(HandshakeError):
        listening.hear(proof)
    with pytest.raises(HandshakeError):
        Connecting(ANNA).hear(answer)


def test_a_proof_cannot_be_sent_back_to_who_made_it() -> None:
    connecting = Connecting(ANNA)
    hello = connecting.hello()
    with pytest.raises(HandshakeError):
        connecting.hear(hello)  # a socket that is connected to itself
    _, answer = Listening(ANNA).hear(hello)
    assert answer is not None
    listening = Listening(ANNA)
    _, own = listening.hear(hello)
    assert own is not None
    with pytest.raises(HandshakeError):
        listening.hear({"kind": "proof", "proof": own["proof"]})


@pytest.mark.parametrize("change", [{"node": "carl"}, {"nonce": "0" * 64}, {"proof": "0" * 64}])
def test_an_answer_that_was_changed_on_the_way_is_refused(change: Frame) -> None:
    connecting = Connecting(ANNA)
    _, answer = Listening(BERT).hear(connecting.hello())
    assert answer is not None
    with pytest.raises(HandshakeError):
        connecting.hear({**answer, **change})


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: {**frame, "kind": "other"},
        lambda frame: {**frame, "node": 7},
        lambda frame: {**frame, "node": ""},
        lambda frame: {**frame, "node": "x" * 1000},
        lambda frame: {**frame, "nonce": None},
        lambda frame: {**frame, "nonce": ["a"] * 64},
        lambda frame: {**frame, "nonce": "a" * 63},
        lambda frame: {**frame, "nonce": "\u00e9" * 64},
        lambda frame: {"kind": frame["kind"]},
    ],
)
def test_a_hello_of_another_form_is_refused(change: Callable[[Frame], Frame]) -> None:
    with pytest.raises(HandshakeError):
        Listening(BERT).hear(change(Connecting(ANNA).hello()))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
FIELDS = st.fixed_dictionaries(
    {}, optional={name: JSON | st.sampled_from(["0" * 64, "anna"]) for name in ("node", "nonce", "proof", "other")}
)


@settings(max_examples=50)
@given(st.sampled_from(["hello", "answer", "proof", "message"]), FIELDS, st.booleans())
def test_whatever_comes_is_refused_or_answered_and_never_believed(kind: str, fields: Frame, after_hello: bool) -> None:
    listening, connecting = Listening(BERT), Connecting(ANNA)
    if after_hello:
        listening.hear(connecting.hello())
    with suppress(HandshakeError):
        node_id, _answer = listening.hear({"kind": kind, **fields})
        assert node_id is None
    with pytest.raises(HandshakeError):
        connecting.hear({"kind": kind, **fields})


def test_any_text_may_be_a_node_id() -> None:
    odd = "\ud800 \u00e9"  # half a surrogate pair, which JSON can carry
    hello, _answer, _proof = recorded(Connecting(Identity("secret", odd)), Listening(BERT))
    assert hello["node"] == odd
