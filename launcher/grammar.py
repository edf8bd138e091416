"""What the values of options may look like: pure functions from the written text to a value of `dlaunch.spec`.

Each takes a `Setting` and raises UsageError that names the flag or the variable, what was given and what is allowed.
The grammars are torchrun's (torch 2.13, ``torch/distributed/run.py``), without its limit to one-digit local ranks.
"""

from __future__ import annotations

import math
import re
import signal

from dlaunch.spec import StreamMap, Streams

from .settings import Setting

# Compiled where they are used, which is rare, and not at every start.
_NUMBER = "[+-]?[0-9]{1,9}"
_DIGITS = "[0-9]{1,9}"
PORT = "[0-9]{1,5}"
HOST = r"[\w.:-]+"
_MODULE = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_COMMA = "\0"  # cannot occur in an argument or a variable
_DEVICE_WISHES = ("auto", "cpu", "gpu", "xpu")
_UNTOUCHABLE = ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")
MAX_PORT = 65535


def whole_number(setting: Setting, least: int = 0) -> int:
    """An integer that is at least ``least``."""
    text = setting.value.strip()
    if not re.fullmatch(_NUMBER, text) or int(text) < least:
        raise setting.wrong(f"Give a whole number, {least} or more.")
    return int(text)


def seconds(setting: Setting, least: float = 0) -> float:
    """A finite duration that is at least ``least`` seconds."""
    value = finite(setting.value)
    if value is None or value < least:
        raise setting.wrong(f"Give a number of seconds, {least:g} or more.")
    return value


def positive_seconds(setting: Setting) -> float | None:
    """A finite duration above zero; None where nothing was given."""
    return above_zero(setting) if setting.value else None


def above_zero(setting: Setting) -> float:
    """A finite duration above zero."""
    value = finite(setting.value)
    if value is None or value <= 0:
        raise setting.wrong("Give a number of seconds, more than 0.")
    return value


def backoff(setting: Setting) -> tuple[float, float]:
    """``FIRST[:MAX]`` seconds; without MAX it is the default one, or FIRST if that is longer."""
    first_text, colon, most_text = setting.value.partition(":")
    first = finite(first_text)
    most = finite(most_text) if colon else max(60.0, first or 0.0)
    if first is None or most is None or not 0 <= first <= most:
        raise setting.wrong("Give FIRST or FIRST:MAX in seconds, with 0 <= FIRST <= MAX.")
    return first, most


def nodes(setting: Setting) -> tuple[int, int]:
    """``N`` or ``MIN:MAX`` with 0 < MIN <= MAX."""
    parts = setting.value.strip().split(":")
    if len(parts) > 2 or not all(re.fullmatch(_NUMBER, part) for part in parts):
        raise setting.wrong("Give N or MIN:MAX, for instance 1 or 2:4.")
    least, most = int(parts[0]), int(parts[-1])
    if not 0 < least <= most:
        raise setting.wrong("Give MIN:MAX with 1 <= MIN <= MAX.")
    return least, most


def workers_wish(setting: Setting) -> str:
    """A number of one or more in plain digits, or the name of a kind of device."""
    text = setting.value.strip()
    if text in _DEVICE_WISHES:
        return text
    if not re.fullmatch(_NUMBER, text) or int(text) < 1:
        raise setting.wrong("Give a number, 1 or more, or auto, cpu, gpu or xpu.")
    return str(int(text))


def streams(setting: Setting) -> StreamMap:
    """``0|1|2|3`` for all local ranks, or ``local_rank:value,...`` for some."""
    text = setting.value.strip()
    if re.fullmatch("[0-3]", text):
        return StreamMap(Streams(int(text)))
    pairs = [re.fullmatch("([0-9]{1,9}):([0-3])", part.strip()) for part in text.split(",")]
    chosen = tuple((int(pair[1]), Streams(int(pair[2]))) for pair in pairs if pair)
    if len(chosen) < len(pairs):
        raise setting.wrong("Give 0, 1, 2 or 3 for all workers, or LOCAL_RANK:VALUE,..., for instance 0:3,1:2.")
    return StreamMap(by_local_rank=chosen)


def local_ranks(setting: Setting) -> frozenset[int] | None:
    """Comma-separated local ranks; None where nothing was given, which means all."""
    text = setting.value.strip()
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(_DIGITS, part) for part in parts):
        raise setting.wrong("Give local ranks with commas between them, for instance 0,1.")
    return frozenset(int(part) for part in parts)


def texts(setting: Setting) -> tuple[str, ...]:
    """Comma-separated texts, ``,,`` for a literal comma; an empty text would match every line and is refused."""
    if not setting.value:
        return ()
    parts = tuple(part.replace(_COMMA, ",") for part in setting.value.replace(",,", _COMMA).split(","))
    if not all(parts):
        raise setting.wrong("Give texts with single commas between them; ',,' is a literal comma.")
    return parts


def modules(setting: Setting) -> tuple[str, ...]:
    """Comma-separated names of modules."""
    if not setting.value.strip():
        return ()
    names = tuple(part.strip() for part in setting.value.split(","))
    if not all(re.fullmatch(_MODULE, name) for name in names):
        raise setting.wrong("Give names of modules with commas between them, for instance transformers,accelerate.")
    return names


def signals(setting: Setting) -> tuple[signal.Signals, ...]:
    """Comma-separated names of signals that a process can handle."""
    names = [name.strip() for name in setting.value.split(",")]
    for name in names:
        if name in _UNTOUCHABLE:
            raise setting.wrong(f"{name} cannot be handled: leave it out.")
        if name not in signal.Signals.__members__:
            raise setting.wrong(f"There is no signal {name!r}: give names such as SIGTERM,SIGUSR1.")
    return tuple(dict.fromkeys(signal.Signals[name] for name in names))


def port(setting: Setting) -> int | None:
    """A TCP port, 0 for a free one; None where nothing was given."""
    text = setting.value.strip()
    if not text:
        return None
    if not re.fullmatch(PORT, text) or int(text) > MAX_PORT:
        raise setting.wrong(f"Give a port from 0 to {MAX_PORT}.")
    return int(text)


def host(setting: Setting) -> str:
    """A host name or an address, an IPv6 one with or without brackets; empty where nothing was given."""
    name = setting.value.strip()
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    if name and not re.fullmatch(HOST, name):
        raise setting.wrong("Give a host name or an address.")
    return name


def configuration(setting: Setting) -> tuple[tuple[str, str], ...]:
    """``KEY=VALUE,...`` of a rendezvous, whatever the keys."""
    text = setting.value.strip()
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    if not all(key.strip() and value.strip() for key, _, value in pairs):
        raise setting.wrong("Give KEY=VALUE,..., for instance join_timeout=60.")
    return tuple((key.strip(), value.strip()) for key, _, value in pairs)


def choice(setting: Setting, allowed: tuple[str, ...]) -> str:
    """One of the words in ``allowed``."""
    if setting.value not in allowed:
        raise setting.wrong(f"Give {', '.join(allowed[:-1])} or {allowed[-1]}.")
    return setting.value


def finite(text: str) -> float | None:
    """The number in ``text``; None for no number, NaN and infinity."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
