"""A module that runs through a data-parallel wrapper and is itself in all else.

[Note: same object, other call]
A script that knows nothing of processes calls ``model(batch)``, reads ``model.fc``, asks ``isinstance(model, Net)``
and saves ``model.state_dict()``. A wrapper in its place breaks the last three. So the script keeps its module, whose
class becomes a subclass of itself with another ``__call__``: from outside it goes to the wrapper, and the wrapper's
own call of the module goes where it always went. Copies and pickles are plain modules of the original class.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T", bound=nn.Module)
_ROUTE = "_dlaunch_route"


class _Route:
    """Where calls go."""

    def __init__(self, wrapper: nn.Module) -> None:
        self.wrapper = wrapper
        self.inside: ContextVar[bool] = ContextVar("inside_the_wrapper", default=False)


class RoutedModule(nn.Module):
    """What the class of a routed module has in front of the original's; see [Note: same object, other call]."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapper; inside it, the module."""
        route: _Route = vars(self)[_ROUTE]
        if route.inside.get():
            return super().__call__(*args, **kwargs)
        token = route.inside.set(True)
        try:
            return route.wrapper(*args, **kwargs)
        finally:
            route.inside.reset(token)

    def train(self: T, mode: bool = True) -> T:
        """As ever; the wrapper follows."""
        vars(self)[_ROUTE].wrapper.training = mode
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the original class would be: a copy is a plain module."""
        original: Any = type(self).__bases__[1]
        plain = _empty(original)
        vars(plain).update({name: value for name, value in vars(self).items() if name != _ROUTE})
        make, arguments, *state = plain.__reduce_ex__(protocol)
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle insists on its object's own class there
            make, arguments = _empty, (original,)
        return make, arguments, *state


def route_through(module: T, wrap: Callable[[T], nn.Module]) -> T:
    """Make calls of ``module`` run through ``wrap(module)``; returns the same object."""
    original = type(module)
    members = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    wrapper = wrap(module)
    module.__class__ = type(original.__name__, (RoutedModule, original), members)
    vars(module)[_ROUTE] = _Route(wrapper)  # not by setattr: the wrapper must not become a submodule of its module
    return module


def wrapper_of(module: nn.Module) -> nn.Module:
    """What ``prepare`` put the module into, for ``no_sync()`` and the like; the module itself where it did nothing."""
    route = vars(module).get(_ROUTE)
    return module if route is None else route.wrapper


def _empty(original: Any) -> Any:
    return original.__new__(original)
