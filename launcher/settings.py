"""Where each option's value comes from: the command line, else DLAUNCH_*, else PET_*, else the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlaunch.errors import UsageError

from .options import BY_SPELLING, OPTIONS, Option, normalize

Given = Mapping[str, "str | bool | None"]  # by dest, from the command line; None: not given

_TRUE = frozenset({"true", "yes", "on", "y", "t"})
_FALSE = frozenset({"false", "no", "off", "n", "f"})


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was written, and who wrote it."""

    value: str
    origin: str  # the flag or variable to name in an error
    is_default: bool = False

    def wrong(self, allowed: str) -> UsageError:
        """The error that says what was given, where, and what is allowed."""
        return UsageError(f"{self.origin} is {self.value!r}.", allowed)


def gather(given: Given, environ: Mapping[str, str]) -> dict[str, Setting]:
    """One setting for every option that takes a value, by dest."""
    return {option.dest: _value_of(option, given, environ) for option in OPTIONS if not option.is_flag}


def gather_flags(given: Given, environ: Mapping[str, str]) -> dict[str, bool]:
    """One truth for every flag, by dest."""
    return {option.dest: _flag_of(option, given, environ) for option in OPTIONS if option.is_flag}


def _value_of(option: Option, given: Given, environ: Mapping[str, str]) -> Setting:
    value = given.get(option.dest)
    if value is not None:
        _refuse_swallowed_flag(option, str(value))
        return Setting(str(value), option.name)
    return _from_variables(option, environ) or Setting(option.default, option.name, is_default=True)


def _flag_of(option: Option, given: Given, environ: Mapping[str, str]) -> bool:
    value = given.get(option.dest)
    if value is not None:
        return bool(value)
    setting = _from_variables(option, environ)
    return option.default == option.name if setting is None else truth(setting)


def _from_variables(option: Option, environ: Mapping[str, str]) -> Setting | None:
    """From the strongest variable that is set and not empty."""
    for variable in option.variables:
        if (value := environ.get(variable, "")).strip():
            return Setting(value, variable)
    return None


def truth(setting: Setting) -> bool:
    """What a word or a number for a truth means."""
    word = setting.value.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    try:
        return bool(int(word))  # as torchrun reads it
    except ValueError:
        raise setting.wrong("Give 1, true, yes or on; or 0, false, no or off.") from None


def _refuse_swallowed_flag(option: Option, value: str) -> None:
    flag = normalize(value.partition("=")[0])
    if flag.startswith("--") and flag in BY_SPELLING:
        raise UsageError(f"{option.name} needs a value, but {value!r} follows it.", f"Give {option.metavar}.")
