"""Threads run under their caller's modes, and their errors come out as they went in, with the replica's index."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn

from dlaunch.parallel.dp.parallel_apply import InReplica, name_the_replica, parallel_apply

USER = ContextVar("USER", default="nobody")


class Call(nn.Module):
    """A module that is a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def modes() -> Any:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        USER.get(),
    )


def test_modules_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3)  # broken unless all three wait at once
    outputs = parallel_apply([Call(lambda _: barrier.wait(timeout=60))] * 3, [0, 1, 2])
    assert sorted(outputs) == [0, 1, 2]


def test_each_module_gets_its_own_input_and_keywords_and_outputs_keep_their_order() -> None:
    modules = [Call(lambda value, more, base=base: base + value + more) for base in (100, 200)]
    assert parallel_apply(modules, [(1,), 2], [{"more": 10}, {"more": 20}]) == [111, 222]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    ],
)
def test_threads_run_under_their_callers_modes(context: Any, replicas: Any) -> None:
    token = USER.set("caller")
    try:
        with context():
            assert parallel_apply([Call(modes)] * replicas, [()] * replicas) == [modes()] * replicas
    finally:
        USER.reset(token)


def test_grad_mode_inside_autocast_and_inference_is_carried_as_a_whole() -> None:
    with torch.autocast("cpu"), torch.no_grad():
        assert parallel_apply([Call(modes)] * 2, [(), ()]) == [modes()] * 2


class Strange(Exception):
    """Its constructor takes what no wrapper could know."""

    def __init__(self, code: Any, *, detail: Any) -> None:
        super().__init__(code, detail)
        self.code = code


def raiser(error: Any) -> Any:
    def function() -> Any:
        raise error

    return Call(function)


@pytest.mark.parametrize("error", [ValueError("bad batch"), RuntimeError("out of memory"), SystemExit("stop")])
def test_an_error_keeps_its_type_and_identity_and_names_the_replica_in_its_message(error: Any) -> None:
    message = str(error)
    with pytest.raises(type(error)) as raised:
        parallel_apply([Call(lambda: 0), raiser(error)], [(), ()])
    assert raised.value is error and str(error) == f"{message} (in replica 1 on device cpu)"


@pytest.mark.parametrize("error", [KeyError("key"), Strange(7, detail="d"), OSError(2, "no file"), StopIteration(3)])
def test_an_error_whose_arguments_programs_read_keeps_them_and_names_the_replica_in_its_notes(error: Any) -> None:
    args = error.args
    with pytest.raises(type(error)) as raised:
        parallel_apply([Call(lambda: 0), Call(lambda: 0), raiser(error)], [(), (), ()])
    assert raised.value is error and error.args == args
    assert error.__notes__ == ["in replica 2 on device cpu"]


def test_an_error_that_is_raised_again_names_the_replica_once() -> None:
    for error in (ValueError("no"), KeyError("key")):
        for _ in range(2):
            with pytest.raises(type(error)):
                parallel_apply([Call(lambda: 0), raiser(error)], [(), ()])
        assert (str(error) + str(getattr(error, "__notes__", ""))).count("in replica 1 on device cpu") == 1


def test_where_tracebacks_show_no_notes_the_replica_is_the_cause() -> None:
    error = KeyError("key")
    name_the_replica(error, "in replica 1 on device cpu", shows_notes=False)
    assert isinstance(error.__cause__, InReplica) and str(error.__cause__) == "in replica 1 on device cpu"
    assert error.args == ("key",)


def test_the_first_of_several_failing_replicas_is_told_after_all_have_ended() -> None:
    both = threading.Barrier(2)

    def fail(text: Any) -> Any:
        both.wait(timeout=60)
        raise ValueError(text)

    with pytest.raises(ValueError, match=r"zero \(in replica 0"):
        parallel_apply([Call(lambda: fail("zero")), Call(lambda: fail("one"))], [(), ()])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


def test_sequences_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 modules, 1 inputs"):
        parallel_apply([Call(int), Call(int)], [()])
