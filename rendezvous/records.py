"""What stands in the store: one named tuple for each kind of key, and its JSON.

Whatever is read may have been written by anybody, so nothing is taken on trust: `read_*` checks every field and
raises `Malformed`, with the key and the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from dlaunch.outcome import ExceptionInfo, ExitStatus, Failure, FailureKind, RunState, TracebackFrame

from .values import Ending, Peer

MAX_TEXT = 20_000  # characters of one text that are kept: a traceback fits, a core dump does not
MOST_ELDERS = 8
MOST_PASSED = 32
MOST_MARKS = 10
MAX_NAME = 500
MOST_WORKERS = 1 << 20  # on a node, and of a job
LAST_ROUND = 1 << 31
MAX_LINES = 40  # of a traceback's frames or a failed worker's last output
_E = TypeVar("_E", bound=Enum)


class Malformed(ValueError):
    """A value under our keys that none of us wrote."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"the key {key} holds {problem}")


class Phase(Enum):
    """Where a round stands."""

    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    CLOSED = "closed"

    @property
    def order(self) -> int:
        """Phases of one round come in this order, and never go back."""
        return list(Phase).index(self)


class Kind(Enum):
    """What a report says of a node in a round."""

    READY = "ready"  # it can start workers; a socket for their store is open
    FAILED = "failed"  # a worker of it failed of itself
    LEAVING = "leaving"  # it is about to go, and stops its workers
    LOST = "lost"  # a peer found its agent gone; its workers may not be dead yet
    STOPPED = "stopped"  # no worker of it lives, and none will start again in this round
    FENCED = "fenced"  # the same, proved by a peer after its agent was gone
    FINISHED = "finished"  # all its workers have succeeded


class Join(Enum):
    """When a node that comes while the job runs below its maximum is taken in."""

    NOW = "now"
    AT_RESTART = "at-restart"
    SETTLE = "settle"  # some time after the last one came


class RunSettings(NamedTuple):
    """What all nodes of a run must agree on."""

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    restart_window_s: float | None = None
    backoff_s: float = 0.0
    backoff_max_s: float = 60.0
    early_stop: bool = True
    join: Join = Join.NOW
    join_settle_s: float = 0.0
    settle_s: float = 2.0  # how long the first round waits for one more than the minimum
    lease_ttl_s: float = 5.0
    outage_limit_s: float = 120.0
    max_node_failures: int | None = None
    cool_down_s: float = 600.0


class SpecRecord(NamedTuple):
    """`spec`: created once, by the first agent."""

    settings: RunSettings
    token: str  # known to whoever may read the run's keys; proves to a peer that one is of this run
    lease: int  # on which the run's own keys stand, long after its end


class NodeRecord(NamedTuple):
    """`nodes/<node id>`: on the node's lease, never changed."""

    node_id: str  # the end of the key
    address: str
    host: str
    boot_id: str
    local_world_size: int
    role: str
    node_rank: int | None = None


class AssignRecord(NamedTuple):
    """`assign/<nonce>/<node id>`: counts only once `round` names its nonce."""

    node_id: str
    host: str
    address: str
    group_rank: int
    group_world_size: int
    base_rank: int
    world_size: int
    local_world_size: int
    role_base_rank: int
    role_world_size: int
    meeting_address: str
    meeting_port: int
    meeting_served: bool
    successor: Peer | None
    first: Peer
    members: tuple[Peer, ...] = ()  # for group rank 0 only


class ReportRecord(NamedTuple):
    """`report/<round>/<node id>/<kind>`: created once; its revision is its place in the round's history."""

    number: int
    node_id: str
    kind: Kind
    revision: int  # of its creation
    meeting_address: str = ""  # of READY
    meeting_port: int = 0
    meeting_served: bool = False
    failure: Failure | None = None  # of FAILED (at once) and STOPPED (with all details)
    reason: str = ""  # of LEAVING


class RoundRecord(NamedTuple):
    """`round`: the only decision record."""

    number: int
    phase: Phase
    reason: str
    culprit: str = ""  # while stopping: the node whose failure is the reason, if one is
    restarts: int = 0  # of the whole job so far
    nonce: str = ""  # of the assignments that count; of the proposal, where there are none
    elders: tuple[str, ...] = ()  # the members that came first, up to eight: they propose
    passed: tuple[str, ...] = ()  # nodes that were registered when it began to run, and did not get ready
    expected: int = 0  # while forming: nodes that are known to come
    delay_s: float = 0.0  # while forming: the backoff before the round may run
    restart_ages_s: tuple[float, ...] = ()  # how long ago each restart was, when this was written
    marks: tuple[str, ...] = ()  # at most ten, of the last failures, to tell a mistake in the script from a fault
    streak_host: str = ""  # the host that the last failures came from
    streak: int = 0  # and how many
    ending: Ending | None = None  # of CLOSED


# --- writing ---------------------------------------------------------------------------------------------------------


def write_spec(record: SpecRecord) -> bytes:
    """The JSON of `spec`."""
    settings = record.settings._asdict() | {"join": record.settings.join.value}
    return _dump({"settings": settings, "token": record.token, "lease": record.lease})


def write_node(record: NodeRecord) -> bytes:
    """The JSON of a registration."""
    fields = record._asdict()
    del fields["node_id"]
    return _dump(fields)


def write_assign(record: AssignRecord) -> bytes:
    """The JSON of an assignment."""
    return _dump(record._asdict())  # a Peer is a list of two


def write_report(record: ReportRecord) -> bytes:
    """The JSON of a report: what the key does not say."""
    fields = {name: value for name, value in record._asdict().items() if name not in _IN_REPORT_KEY}
    return _dump(fields | {"failure": _failure_fields(record.failure)})


def write_round(record: RoundRecord) -> bytes:
    """The JSON of `round`."""
    ending = record.ending
    shown = ending and ending._asdict() | {"state": ending.state.value, "failure": _failure_fields(ending.failure)}
    return _dump(record._asdict() | {"phase": record.phase.value, "ending": shown})


_IN_REPORT_KEY = ("number", "node_id", "kind", "revision")


def _dump(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _failure_fields(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    exception = failure.exception
    return _cut(failure._asdict()) | {
        "kind": failure.kind.value,
        "status": failure.status and failure.status._asdict(),
        "last_output": [line[:MAX_TEXT] for line in failure.last_output[-MAX_LINES:]],
        "exception": exception
        and {
            "type": exception.type[:MAX_TEXT],
            "message": exception.message[:MAX_TEXT],
            "frames": [_cut(frame._asdict()) for frame in exception.frames[-MAX_LINES:]],
            "traceback": exception.traceback[-MAX_TEXT:],
        },
    }


def _cut(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in fields.items()}


# --- reading ---------------------------------------------------------------------------------------------------------


class _Fields:
    """The fields of a JSON object, each taken with its type."""

    def __init__(self, key: str, value: object) -> None:
        if not isinstance(value, dict):
            raise Malformed(key, "something else than a JSON object")
        self._key = key
        self._value = value

    @classmethod
    def parse(cls, key: str, data: bytes) -> _Fields:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise Malformed(key, "something else than JSON") from None
        return cls(key, value)

    def whole(self, name: str, least: int = 0, most: int = (1 << 63) - 1) -> int:
        value = self._value.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._wrong(name)
        return value

    def number(self, name: str, least: float = 0.0) -> float:
        value = self._value.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < 1e15:
            raise self._wrong(name)
        return float(value)

    def text(self, name: str, *, empty: bool = True) -> str:
        value = self._value.get(name)
        if not isinstance(value, str) or len(value) > MAX_TEXT or not (value or empty):
            raise self._wrong(name)
        return value

    def name(self, name: str, *, empty: bool = False) -> str:
        """A text that may stand in a key, a variable or a sentence."""
        value = self.text(name, empty=empty)
        if not _is_name(value):
            raise self._wrong(name)
        return value

    def names(self, name: str, most: int) -> tuple[str, ...]:
        values = self.texts(name, most)
        if not all(map(_is_name, values)):
            raise self._wrong(name)
        return values

    def truth(self, name: str) -> bool:
        value = self._value.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name)
        return value

    def choice(self, name: str, enum: type[_E]) -> _E:
        try:
            return enum(self._value.get(name))
        except ValueError:
            raise self._wrong(name) from None

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def within(self, name: str) -> _Fields:
        return _Fields(self._key, self._value.get(name))

    def items(self, name: str, most: int) -> list[Any]:
        value = self._value.get(name)
        if not isinstance(value, list) or len(value) > most:
            raise self._wrong(name)
        return value

    def numbers(self, name: str, most: int) -> tuple[float, ...]:
        items = self.items(name, most)
        return tuple(_Fields(self._key, {name: item}).number(name) for item in items)

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        items = self.items(name, most)
        if not all(isinstance(item, str) and len(item) <= MAX_TEXT for item in items):
            raise self._wrong(name)
        return tuple(items)

    def peer(self, name: str) -> Peer:
        return self._peer(name, self._value.get(name))

    def peers(self, name: str) -> tuple[Peer, ...]:
        return tuple(self._peer(name, item) for item in self.items(name, 1_000_000))

    def _peer(self, name: str, value: object) -> Peer:
        if not isinstance(value, list) or len(value) != 2 or not all(map(_is_name, value)):
            raise self._wrong(name)
        return Peer(*value)

    def _wrong(self, name: str) -> Malformed:
        return Malformed(self._key, f"a wrong or missing {name!r}")

    def objects(self, name: str, most: int) -> list[_Fields]:
        return [_Fields(self._key, item) for item in self.items(name, most)]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME and (not value or value.isprintable())


def read_spec(key: str, data: bytes) -> SpecRecord:
    """`spec`, or Malformed."""
    fields = _Fields.parse(key, data)
    inner = fields.within("settings")
    least = inner.whole("min_nodes", 1)
    settings = RunSettings(
        min_nodes=least,
        max_nodes=inner.whole("max_nodes", least),
        max_restarts=inner.whole("max_restarts"),
        restart_window_s=inner.number("restart_window_s") if inner.has("restart_window_s") else None,
        backoff_s=inner.number("backoff_s"),
        backoff_max_s=inner.number("backoff_max_s"),
        early_stop=inner.truth("early_stop"),
        join=inner.choice("join", Join),
        join_settle_s=inner.number("join_settle_s"),
        settle_s=inner.number("settle_s"),
        lease_ttl_s=inner.number("lease_ttl_s", 1.0),
        outage_limit_s=inner.number("outage_limit_s"),
        max_node_failures=inner.whole("max_node_failures", 1) if inner.has("max_node_failures") else None,
        cool_down_s=inner.number("cool_down_s"),
    )
    return SpecRecord(settings, fields.name("token"), fields.whole("lease", 1))


def read_node(key: str, data: bytes) -> NodeRecord:
    """A registration, or Malformed."""
    fields = _Fields.parse(key, data)
    return NodeRecord(
        node_id=key.rpartition("/")[2],
        address=fields.name("address"),
        host=fields.name("host"),
        boot_id=fields.name("boot_id", empty=True),
        local_world_size=fields.whole("local_world_size", 1, MOST_WORKERS),
        role=fields.name("role", empty=True),
        node_rank=fields.whole("node_rank") if fields.has("node_rank") else None,
    )


def read_assign(key: str, data: bytes) -> AssignRecord:
    """An assignment, or Malformed."""
    fields = _Fields.parse(key, data)
    record = AssignRecord(
        node_id=key.rpartition("/")[2],
        host=fields.name("host"),
        address=fields.name("address"),
        group_rank=fields.whole("group_rank", most=MOST_WORKERS),
        group_world_size=fields.whole("group_world_size", 1, MOST_WORKERS),
        base_rank=fields.whole("base_rank", most=MOST_WORKERS),
        world_size=fields.whole("world_size", 1, MOST_WORKERS),
        local_world_size=fields.whole("local_world_size", 1, MOST_WORKERS),
        role_base_rank=fields.whole("role_base_rank", most=MOST_WORKERS),
        role_world_size=fields.whole("role_world_size", 1, MOST_WORKERS),
        meeting_address=fields.name("meeting_address"),
        meeting_port=fields.whole("meeting_port", 1, 65535),
        meeting_served=fields.truth("meeting_served"),
        successor=fields.peer("successor") if fields.has("successor") else None,
        first=fields.peer("first"),
        members=fields.peers("members"),
    )
    if fields.name("node_id") != record.node_id:
        raise Malformed(key, "the assignment of another node")
    if record.group_rank >= record.group_world_size:
        raise Malformed(key, "a group rank beyond its world")
    if record.base_rank + record.local_world_size > record.world_size:
        raise Malformed(key, "ranks beyond their world")
    if record.role_base_rank + record.local_world_size > record.role_world_size:
        raise Malformed(key, "role ranks beyond their world")
    return record


def read_report(key: str, data: bytes, revision: int) -> ReportRecord:
    """A report, or Malformed."""
    *_, number, node_id, kind = key.split("/")
    fields = _Fields.parse(key, data)
    try:
        known = Kind(kind)
    except ValueError:
        raise Malformed(key, "no report that we know of") from None
    return ReportRecord(
        number=int(number),
        node_id=node_id,
        kind=known,
        revision=revision,
        meeting_address=fields.name("meeting_address", empty=True),
        meeting_port=fields.whole("meeting_port", most=65535),
        meeting_served=fields.truth("meeting_served"),
        failure=_read_failure(fields.within("failure")) if fields.has("failure") else None,
        reason=fields.text("reason"),
    )


def read_round(key: str, data: bytes) -> RoundRecord:
    """`round`, or Malformed."""
    fields = _Fields.parse(key, data)
    phase = fields.choice("phase", Phase)
    return RoundRecord(
        number=fields.whole("number", 1, LAST_ROUND),
        phase=phase,
        reason=fields.text("reason"),
        culprit=fields.name("culprit", empty=True),
        restarts=fields.whole("restarts"),
        nonce=fields.name("nonce", empty=True),
        elders=fields.names("elders", MOST_ELDERS),
        passed=fields.names("passed", MOST_PASSED),
        expected=fields.whole("expected"),
        delay_s=fields.number("delay_s"),
        restart_ages_s=fields.numbers("restart_ages_s", 100_000),
        marks=fields.texts("marks", MOST_MARKS),
        streak_host=fields.name("streak_host", empty=True),
        streak=fields.whole("streak"),
        ending=_read_ending(fields.within("ending")) if phase is Phase.CLOSED else None,
    )


def _read_ending(fields: _Fields) -> Ending:
    return Ending(
        state=fields.choice("state", RunState),
        exit_code=fields.whole("exit_code", most=255),
        reason=fields.text("reason"),
        restarts_used=fields.whole("restarts_used"),
        failure=_read_failure(fields.within("failure")) if fields.has("failure") else None,
    )


def _read_failure(fields: _Fields) -> Failure:
    return Failure(
        kind=fields.choice("kind", FailureKind),
        attempt=fields.whole("attempt"),
        rank=fields.whole("rank") if fields.has("rank") else None,
        local_rank=fields.whole("local_rank") if fields.has("local_rank") else None,
        node=fields.text("node"),
        pid=fields.whole("pid") if fields.has("pid") else None,
        status=_read_status(fields.within("status")) if fields.has("status") else None,
        at=fields.number("at"),
        lifetime_s=fields.number("lifetime_s"),
        detail=fields.text("detail"),
        exception=_read_exception(fields.within("exception")) if fields.has("exception") else None,
        finalized=fields.truth("finalized"),
        last_output=fields.texts("last_output", MAX_LINES),
        log_file=fields.text("log_file") if fields.has("log_file") else None,
    )


def _read_status(fields: _Fields) -> ExitStatus:
    if fields.has("signal"):
        return ExitStatus(signal=fields.whole("signal", 1))
    return ExitStatus(code=fields.whole("code"))


def _read_exception(fields: _Fields) -> ExceptionInfo:
    frames = [
        TracebackFrame(frame.text("file"), frame.whole("line"), frame.text("function"), frame.text("source"))
        for frame in fields.objects("frames", MAX_LINES)
    ]
    return ExceptionInfo(fields.text("type"), fields.text("message"), tuple(frames), fields.text("traceback"))
