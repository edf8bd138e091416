"""From settings to the job: a pure function, so tables."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from dlaunch.errors import ConfigurationError, UsageError
from dlaunch.launcher.settings import Given
from dlaunch.launcher.specify import specify
from dlaunch.spec import JobSpec, ProgramKind, StartMethod, Streams


def job(
    given: Given | None = None, command: Sequence[str] = ("train.py",), environ: dict[str, str] | None = None
) -> JobSpec:
    return specify(given or {}, command, environ or {}, interpreter="/usr/bin/python3", new_run_id="new")


def test_the_defaults_are_not_torchruns() -> None:
    spec = job(command=("train.py", "--epochs", "3"))
    assert spec.program.command() == ["/usr/bin/python3", "-u", "train.py", "--epochs", "3"]
    assert (spec.nproc_per_node, spec.role, spec.run_id) == ("1", "default", "new")
    assert (spec.restart.max_restarts, spec.grace_s) == (0, 30.0)
    assert spec.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert (spec.master_addr, spec.master_port) == ("127.0.0.1", 0)
    assert spec.output.keep_files
    assert spec.output.log_dir is None
    assert not spec.local_rank_argument


def test_a_flag_does_not_reach_the_job() -> None:
    spec = job(
        {
            "nproc_per_node": "auto",
            "rdzv_id": "mine",
            "role": "trainer",
            "start_method": "exec",
            "max_restarts": "5",
            "restart_window": "600",
            "backoff": "1:8",
            "early_stop": False,
            "shutdown_timeout": "2.5",
            "signals_to_handle": "SIGTERM,SIGUSR1",
            "log_dir": "logs",
            "redirects": "1",
            "tee": "10:3",
            "local_ranks_filter": "0,2",
            "duplicate_stdout_filters": "a,,b",
            "duplicate_stderr_filters": "c,d",
            "virtual_local_rank": True,
            "use_env": False,
            "summary_json": "out.json",
        },
        environ={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"},
    )
    assert (spec.nproc_per_node, spec.run_id, spec.role) == ("auto", "mine", "trainer")
    assert spec.start_method is StartMethod.EXEC
    policy = spec.restart
    assert (policy.max_restarts, policy.window_s, policy.backoff_s, policy.backoff_max_s) == (5, 600.0, 1.0, 8.0)
    assert not policy.early_stop
    assert spec.grace_s == 2.5
    assert spec.signals == (signal.SIGTERM, signal.SIGUSR1)
    output = spec.output
    assert (output.log_dir, output.redirects.default, output.tee.of(10)) == (Path("logs"), Streams.OUT, Streams.BOTH)
    assert output.local_ranks_filter == frozenset({0, 2})
    assert (output.stdout_filters, output.stderr_filters) == (("a,b",), ("c", "d"))
    assert output.line_prefix_template == "[${rank}]"
    assert spec.virtual_local_rank
    assert spec.local_rank_argument
    assert spec.summary_json == Path("out.json")


def test_preload_does_not_reach_the_job() -> None:
    assert job({"preload": "transformers,accelerate"}).preload == ("transformers", "accelerate")


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, ProgramKind.SCRIPT),
        ({"module": True}, ProgramKind.MODULE),
        ({"no_python": True}, ProgramKind.EXECUTABLE),
        ({"run_path": True}, ProgramKind.SCRIPT),
        ({"run_path": True, "no_python": True}, ProgramKind.SCRIPT),
    ],
)
def test_the_kind_of_program_is_wrong(flags: dict[str, bool], kind: ProgramKind) -> None:
    assert job(flags).program.kind is kind


@pytest.mark.parametrize(
    ("method", "expected"),
    [("warm", "warm"), ("exec", "exec"), ("fork", "warm"), ("forkserver", "warm"), ("spawn", "exec")],
)
def test_a_start_method_of_torchruns_means_something_else(method: str | None, expected: str) -> None:
    assert job({"start_method": method}).start_method is StartMethod(expected)


@pytest.mark.parametrize("method", [None, "exec", "spawn", "fork", "forkserver"])
def test_a_program_without_python_is_started_warm(method: str | None) -> None:
    spec = job({"no_python": True, "start_method": method}, ("ls",))
    assert spec.start_method is StartMethod.EXEC
    assert spec.program.command() == ["ls"]


def test_dev_null_keeps_files() -> None:
    spec = job({"log_dir": "/dev/null"})
    assert not spec.output.keep_files
    assert spec.output.log_dir is None


@pytest.mark.parametrize(
    ("given", "meeting"),
    [
        ({}, ("127.0.0.1", 0)),
        ({"master_port": "29500"}, ("127.0.0.1", 29500)),
        ({"master_addr": "node0"}, ("node0", 0)),
        ({"master_addr": "[::1]", "master_port": "1"}, ("::1", 1)),
        ({"local_addr": "10.0.0.1"}, ("10.0.0.1", 0)),
        ({"local_addr": "10.0.0.1", "master_addr": "node0"}, ("node0", 0)),
        ({"rdzv_endpoint": "node0:29400"}, ("node0", 29400)),
        ({"rdzv_endpoint": "node0:29400", "master_port": "1"}, ("node0", 29400)),
        ({"rdzv_endpoint": "[::1]"}, ("::1", 0)),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "node0:29400"}, ("127.0.0.1", 0)),
        ({"rdzv_backend": "c10d", "master_addr": "node0", "master_port": "1"}, ("127.0.0.1", 0)),
        ({"rdzv_backend": "c10d", "local_addr": "node1"}, ("node1", 0)),
        ({"rdzv_backend": "etcd", "rdzv_endpoint": "etcd"}, ("127.0.0.1", 0)),
        ({"rdzv_backend": "etcd-v2", "rdzv_conf": "protocol=https"}, ("127.0.0.1", 0)),
        ({"standalone": True, "master_port": "29500", "rdzv_endpoint": "node0:1"}, ("127.0.0.1", 0)),
        ({"rdzv_endpoint": "e1:2379"}, ("127.0.0.1", 0)),  # an etcd, which one node does not need
        ({"rdzv_endpoint": "e1,e2,e3"}, ("127.0.0.1", 0)),
        ({"rdzv_backend": "static", "rdzv_endpoint": "node0:2379"}, ("node0", 2379)),
    ],
)
def test_workers_meet_elsewhere_than_under_torchrun(given: dict[str, str | bool], meeting: tuple[str, int]) -> None:
    spec = job(given)
    assert (spec.master_addr, spec.master_port) == meeting


@pytest.mark.parametrize("backend", ["c10d", "etcd", "etcd-v2"])
def test_a_node_rank_that_a_dynamic_run_ignores_is_refused(backend: str) -> None:
    assert job({"rdzv_backend": backend, "node_rank": "1"}).program.target == "train.py"


def test_standalone_replaces_a_given_id() -> None:
    assert job({"standalone": True, "rdzv_id": "mine"}).run_id == "mine"


def test_variables_of_the_environment_do_not_reach_the_job() -> None:
    environ = {"PET_NPROC_PER_NODE": "2", "DLAUNCH_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "4", "PET_MODULE": "true"}
    spec = job(environ=environ)
    assert (spec.nproc_per_node, spec.restart.max_restarts) == ("3", 4)
    assert spec.program.kind is ProgramKind.MODULE


def test_the_grace_period_of_torch_is_not_honoured() -> None:
    assert job(environ={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}).grace_s == 7.0


@pytest.mark.parametrize(
    "given",
    [
        {"numa_binding": "node"},
        {"logs_specs": "mine"},
        {"event_log_handler": "console"},
        {"hosts": "a,b"},
        {"detach": True},
    ],
)
def test_a_feature_that_is_to_come_is_ignored(given: dict[str, str | bool]) -> None:
    with pytest.raises(ConfigurationError, match="his version does not"):
        job(given)


@pytest.mark.parametrize("given", [{"logs_specs": "default"}, {"event_log_handler": "null"}, {"nnodes": "1:1"}])
def test_a_harmless_value_is_refused(given: dict[str, str | bool]) -> None:
    assert job(given).program.target == "train.py"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"module": True, "no_python": True}, "-m/--module cannot stand with --no-python."),
        ({"module": True, "run_path": True}, "-m/--module cannot stand with --run-path."),
        ({"no_python": True, "start_method": "warm"}, "--start-method is 'warm'."),
        ({"no_python": True, "use_env": False}, "--no-use-env cannot stand with --no-python."),
        ({"no_python": True, "preload": "a"}, "--preload is 'a'."),
        ({"start_method": "exec", "preload": "a"}, "--preload is 'a'."),
        ({"log_dir": "/dev/null", "duplicate_stdout_filters": "a"}, "--duplicate-stdout-filters is 'a'."),
        ({"node_rank": "1"}, "--node-rank is '1'."),
        ({"rdzv_backend": "zookeeper"}, "--rdzv-backend is 'zookeeper'."),
        ({"rdzv_backend": "static", "rdzv_endpoint": "a:1,b:1"}, "--rdzv-endpoint is 'a:1,b:1'."),
        ({"rdzv_conf": "join_timeot=60"}, "--rdzv-conf has no key 'join_timeot'."),
        ({"join": "later"}, "--join is 'later'."),
        ({"lease_ttl": "1.9"}, "--lease-ttl is '1.9'."),
        ({"outage_limit": "-1"}, "--outage-limit is '-1'."),
        ({"rdzv_timeout": "0"}, "--rdzv-timeout is '0'."),
        ({"max_node_failures": "0"}, "--max-node-failures is '0'."),
        ({"cool_down": "soon"}, "--cool-down is 'soon'."),
        ({"numa_binding": "moon"}, "--numa-binding is 'moon'."),
        ({"monitor_interval": "nan"}, "--monitor-interval is 'nan'."),
        ({"start_method": "magic"}, "--start-method is 'magic'."),
    ],
)
def test_a_contradiction_is_taken(given: dict[str, str | bool], sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        job(given)
    assert refusal.value.sentence == sentence
