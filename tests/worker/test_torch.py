"""The warm start with torch in it: preloaded, forked, alike."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dlaunch.clock import now

from .driver import Driver, Worker
from .marked import wait_until_gone
from .twins import BASIC, Surroundings, run_in

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
SCRIPTS = Path(__file__).parent / "scripts"
ELASTIC = {"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}


class Warm:
    """One starter that holds torch; the script is exchanged for every test."""

    def __init__(self, folder: Path) -> None:
        self.here = Surroundings(folder, {**BASIC, **ELASTIC}, torch=True)
        self.driver = self.here.starter("warm", ["script.py"])
        self.preloaded = self.driver.starter_says("ready")["preloaded"]

    def stage(self, name: str) -> None:
        shutil.copy(SCRIPTS / name, self.here.cwd / "script.py")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    found = Warm(tmp_path_factory.mktemp("warm"))
    with found.driver:
        yield found


def test_torch_and_what_a_first_step_imports_are_preloaded(warm: Warm) -> None:
    assert {"torch", "torch.distributed", "torch._dynamo"} <= set(warm.preloaded)


def test_a_first_step_and_a_save_import_nothing_of_torch(warm: Warm) -> None:
    (warm.here.cwd / "script.py").write_text(
        "import sys\nbefore = set(sys.modules)\n"
        "import torch, io\nfrom torch.optim import AdamW\n"
        "model = torch.nn.Linear(2, 2)\noptimizer = AdamW(model.parameters())\n"
        "model(torch.ones(1, 2)).sum().backward()\noptimizer.step()\ntorch.save(model.state_dict(), io.BytesIO())\n"
        "print([name for name in sys.modules if name not in before and name.startswith('torch')])\n"
    )
    assert run_in(warm.driver).stdout == "[]\n"


@pytest.mark.parametrize("script", ["torch_processes.py", "torch_record.py"])
def test_a_torch_script_behaves_alike(warm: Warm, script: str) -> None:
    warm.stage(script)
    assert run_in(warm.driver) == warm.here.plainly(["script.py"])


def test_a_torch_script_finds_the_same_state_and_its_own_random_numbers(warm: Warm) -> None:
    warm.stage("torch_state.py")
    plain = warm.here.plainly(["script.py"])
    workers = [run_in(warm.driver) for _ in range(2)]
    assert {worker.exit_code for worker in workers} == {plain.exit_code} == {0}
    drawn, state = zip(*(result.stdout.splitlines() for result in [plain, *workers]), strict=True)
    for found in state[1:]:
        assert json.loads(found) == json.loads(state[0])
    for numbers in zip(*map(json.loads, drawn), strict=True):
        assert len(set(numbers)) == 3


def test_variables_that_differ_from_the_starters_reach_torch(warm: Warm) -> None:
    (warm.here.cwd / "script.py").write_text(
        "import torch, torch.distributed as dist\nprint(torch.get_num_threads(), dist.get_debug_level().name)\n"
    )
    variables = {"OMP_NUM_THREADS": "3", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    assert warm.driver.spawn(environment=variables).out.all() == b"3 INFO\n"
    assert warm.driver.spawn().out.all() == b"1 OFF\n"


def test_torchs_own_record_writes_the_error_file(warm: Warm, tmp_path: Path) -> None:
    warm.stage("torch_record.py")
    worker = warm.driver.spawn(environment={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
    assert worker.said()[0]["message"] == "recorded by torch"
    document = json.loads((tmp_path / "error.json").read_text())
    assert document["message"]["message"] == "ValueError: recorded by torch"
    assert "errors/__init__.py" in document["message"]["extraInfo"]["py_callstack"]


def test_all_that_was_preloaded_is_out_of_the_garbage_collectors_way(warm: Warm) -> None:
    (warm.here.cwd / "script.py").write_text("import gc\nprint(gc.get_freeze_count() > 100_000)\n")
    assert run_in(warm.driver).stdout == "True\n"


class Round:
    """A store of its own, and two workers that meet there."""

    def __init__(self, driver: Driver, store_id: int) -> None:
        self.store_id = store_id
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            place = {"address": "127.0.0.1", "port": self.port, "world_size": 2}
            driver.ask({"kind": "serve_store", "id": store_id, **place}, [listener.fileno()])
        self.pid: int = driver.starter_says("started", store_id)["pid"]
        self._driver = driver

    def workers(self, arguments: Sequence[str] = ()) -> list[Worker]:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return [
            self._driver.spawn(
                environment={**meeting, "RANK": str(rank), "WORLD_SIZE": "2"}, arguments=[*arguments] or None
            )
            for rank in range(2)
        ]


@pytest.mark.parametrize("way", ["env", "tcp"])
def test_each_round_meets_at_a_fresh_store(warm: Warm, way: str) -> None:
    warm.stage("torch_meeting.py")
    for number in range(2):
        meeting = Round(warm.driver, 1000 + 10 * number + len(way))
        workers = meeting.workers([way])
        assert [worker.out.all() for worker in workers] == [b"3.0 False\n"] * 2, workers[0].err.all().decode()
        assert [warm.driver.exit_code(worker) for worker in workers] == [0, 0]
        assert warm.driver.sweep() == []  # a store is not held against the workers
        assert warm.driver.starter_says("exited", meeting.store_id)["status"] == signal.SIGKILL
        assert wait_until_gone([meeting.pid]) == []


def test_the_store_dies_with_the_starter(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    with Surroundings(tmp_path, torch=True).starter("warm", ["script.py"]) as driver:
        driver.starter_says("ready")
        meeting = Round(driver, 1)
        os.kill(driver.starter_pid, signal.SIGKILL)
        driver.guard_says("starter_exited")
        driver.guard_says("swept")
        assert wait_until_gone([meeting.pid]) == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", meeting.port)) != 0


def test_the_store_dies_at_the_deadline_and_the_next_round_meets_again(warm: Warm) -> None:
    warm.stage("torch_meeting.py")
    meeting = Round(warm.driver, 3000)
    warm.driver.ask({"kind": "deadline", "at": now()})
    warm.driver.starter_says("overdue")
    assert wait_until_gone([meeting.pid]) == []
    assert warm.driver.starter_says("exited", meeting.store_id)["status"] == signal.SIGKILL
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", meeting.port)) != 0
    warm.driver.ask({"kind": "deadline", "at": now() + 1000.0})
    workers = Round(warm.driver, 3010).workers(["tcp"])
    assert [worker.out.all() for worker in workers] == [b"3.0 False\n"] * 2, workers[0].err.all().decode()
    assert warm.driver.sweep() == []
    warm.driver.ask({"kind": "deadline", "at": None})
