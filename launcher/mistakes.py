"""What is wrong with a command line that could not be parsed, in one sentence, with the likely flag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from dlaunch.errors import UsageError

from .options import BY_DEST, BY_SPELLING, Option, normalize

_SEE = "See dlaunch --help."


def as_usage_error(error: click.ClickException, arguments: Sequence[str]) -> UsageError:
    """click's complaint in our words."""
    match error:
        case click.NoSuchOption():
            flag = _as_written(error.option_name, arguments)
            return UsageError(f"There is no flag {flag}.", suggestion(flag))
        case click.BadOptionUsage():
            return _bad_usage(error.option_name)
        case _:
            return UsageError(error.format_message(), _SEE)


def suggestion(flag: str) -> str:
    """The flag that was likely meant by ``flag``, as a sentence."""
    from difflib import get_close_matches  # noqa: PLC0415  -- only a mistake pays for it

    dashed = "--" + normalize("--" + flag.lstrip("-")).lstrip("-")
    close = get_close_matches(dashed, list(BY_SPELLING), n=1, cutoff=0.7)
    close = close or [spelling for spelling in BY_SPELLING if spelling.startswith(dashed) and len(dashed) > 3]
    return f"Did you mean {close[0]}?" if close else "Flags of the script stand after it. " + _SEE


def _as_written(name: str, arguments: Sequence[str]) -> str:
    """click names the first letter of ``-nproc=2``; find the whole of it."""
    if name.startswith("--"):
        return next((word.partition("=")[0] for word in arguments if normalize(word.partition("=")[0]) == name), name)
    return next((word.partition("=")[0] for word in arguments if word.startswith("-") and name[1:] in word), name)


def _bad_usage(name: str) -> UsageError:
    option = BY_SPELLING.get(normalize(name))
    if option is None:
        return UsageError(f"{name} takes no value.", _SEE)
    if option.is_flag:
        return UsageError(f"{name} takes no value.", f"Say {option.name} alone.")
    return UsageError(f"{name} needs a value.", f"Give {name} {option.metavar}.")


def summary_file(arguments: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """The file of ``--summary-json``, as far as a command line with a mistake in it can tell.

    The words are read up to the first that is no option of ours: what follows may belong to the script.
    """
    option = BY_DEST["summary_json"]
    found = next((environ[name] for name in option.variables if environ.get(name)), "")
    for known, value in _understood(iter(arguments[1:] if arguments[:1] == ["run"] else arguments)):
        if known is option:
            found = value
    return Path(found) if found else None


def _understood(words: Iterator[str]) -> Iterator[tuple[Option, str]]:
    """The options, with their values, that stand before the first word that is none."""
    for word in words:
        flag, attached, value = word.partition("=")
        option = BY_SPELLING.get(normalize(flag))
        if option is None and not word.startswith("--"):  # -r3
            option, attached, value = BY_SPELLING.get(word[:2]), word[2:], word[2:]
        if option is None:
            return
        yield option, value if option.is_flag or attached else next(words, "")
