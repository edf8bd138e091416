"""The way into a run: read what stands in the store, create the run if there is none, and compare the settings."""

from __future__ import annotations

from collections.abc import Callable

from dlaunch.errors import ConfigurationError, DlaunchError, StoreUnreachable

from .desk import TIMEOUT_S, Desk
from .keys import Keys
from .records import Malformed, Phase, RoundRecord, RunSettings, SpecRecord, read_spec, write_round, write_spec
from .store import (
    Answer,
    Compare,
    GrantLease,
    KeyValue,
    LeaseGranted,
    Put,
    Range,
    RevokeLease,
    StoreError,
    Target,
    Trouble,
    Txn,
    TxnAnswer,
)

RUN_LEASE_S = 3600  # how long a run is remembered after its last agent is gone

Joined = Callable[[SpecRecord, "KeyValue | None", int], None]


class Joining:
    """One agent's way into its run. ``joined`` gets the run's spec, its `round`, and the revision of both."""

    def __init__(
        self,
        desk: Desk,
        keys: Keys,
        run_id: str,
        settings: RunSettings,
        connect_s: float,
        fresh: Callable[[], str],
        joined: Joined,
        refuse: Callable[[DlaunchError], None],
    ) -> None:
        self._desk = desk
        self._keys = keys
        self._run_id = run_id
        self._settings = settings
        self._connect_s = connect_s
        self._fresh = fresh
        self._joined = joined
        self._refuse = refuse
        self._began_at = 0.0
        self._lease = 0  # for a run that is to be created

    def begin(self) -> None:
        """Start."""
        self._began_at = self._desk.now
        self._read()

    def _read(self) -> None:
        request = Txn((), _both(self._keys))
        self._desk.ask(request, TIMEOUT_S, self._has_read)

    def _has_read(self, answer: Answer | StoreError) -> None:
        if not isinstance(answer, TxnAnswer):
            if isinstance(answer, StoreError):
                self._retry(answer)
            return
        spec, current = answer.ranges
        if not spec.kvs and current.kvs:
            sentence = f"The run's keys are damaged: there is a {self._keys.round} and no {self._keys.spec}."
            self._refuse(StoreUnreachable(sentence, "Choose another --rdzv-id."))
            return
        if not spec.kvs:
            self._create()
            return
        try:
            record = read_spec(spec.kvs[0].key, spec.kvs[0].value)
        except Malformed as problem:
            self._refuse(not_ours(problem))
            return
        if contradiction := _contradiction(self._settings, record.settings):
            self._refuse(
                ConfigurationError(
                    f"The run {self._run_id!r} has {contradiction}.",
                    "Start every node with the same flags, or choose another --rdzv-id.",
                )
            )
            return
        self._joined(record, current.kvs[0] if current.kvs else None, answer.revision)

    def _retry(self, error: StoreError) -> None:
        if error.is_lasting or self._desk.now - self._began_at >= self._connect_s:
            self._refuse(StoreUnreachable(error.sentence, "See --rdzv-endpoint."))
        else:
            self._desk.retry("join", self._read)

    def _create(self) -> None:
        if self._lease:
            self._write(self._lease)
        else:
            self._desk.ask(GrantLease(RUN_LEASE_S), TIMEOUT_S, self._granted)

    def _granted(self, answer: Answer | StoreError) -> None:
        if isinstance(answer, LeaseGranted):
            self._lease = answer.lease
            self._write(answer.lease)
        elif isinstance(answer, StoreError):
            self._retry(answer)

    def _write(self, lease: int) -> None:
        keys = self._keys
        spec = SpecRecord(self._settings, self._fresh() + self._fresh(), lease)
        first = RoundRecord(1, Phase.FORMING, "the run begins")
        request = Txn(
            compares=tuple(Compare(key, Target.CREATE_REVISION, 0) for key in (keys.spec, keys.round)),
            success=(Put(keys.spec, write_spec(spec), lease), Put(keys.round, write_round(first), lease), *_both(keys)),
            failure=_both(keys),
        )
        self._desk.ask(request, TIMEOUT_S, self._written)

    def _written(self, answer: Answer | StoreError) -> None:
        if isinstance(answer, StoreError) and not answer.maybe_done:
            if answer.trouble is Trouble.NO_LEASE:
                self._lease = 0
            self._retry(answer)
        elif isinstance(answer, TxnAnswer):  # ours, or another's: what is there counts
            stands_on = {kv.lease for found in answer.ranges for kv in found.kvs}
            if not answer.succeeded and self._lease not in stands_on:  # or it was ours, sent before without an answer
                self._desk.ask(RevokeLease(self._lease), TIMEOUT_S, lambda _answer: None)
                self._lease = 0
            self._has_read(answer)
        else:
            self._read()


def _both(keys: Keys) -> tuple[Range, Range]:
    return Range(keys.spec), Range(keys.round)


def not_ours(problem: Malformed) -> StoreUnreachable:
    """A value without which nothing can go on, and which none of us wrote."""
    return StoreUnreachable(f"{problem}.", "Another program writes there: choose another --rdzv-id.")


def _contradiction(ours: RunSettings, theirs: RunSettings) -> str:
    """In which setting two agents of one run disagree, with both values; empty: in none."""
    for name, mine in ours._asdict().items():
        other = theirs._asdict()[name]
        if mine != other:
            return f"{_FLAGS[name]} {_shown(other)}, but this node was started with {_shown(mine)}"
    return ""


_FLAGS = {
    "min_nodes": "a minimum of --nnodes of",
    "max_nodes": "a maximum of --nnodes of",
    "max_restarts": "--max-restarts",
    "restart_window_s": "--restart-window",
    "backoff_s": "--backoff",
    "backoff_max_s": "a maximum of --backoff of",
    "early_stop": "--early-stop",
    "join": "--join",
    "join_settle_s": "--join",
    "settle_s": "a last_call_timeout of",
    "lease_ttl_s": "--lease-ttl",
    "outage_limit_s": "--outage-limit",
    "max_node_failures": "--max-node-failures",
    "cool_down_s": "--cool-down",
}


def _shown(value: object) -> str:
    return str(getattr(value, "value", value))
