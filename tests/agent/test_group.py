"""The workers of one node in a world of several: who they are told to be, where they meet, where their files are."""

from __future__ import annotations

import ast
import selectors
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlaunch import frames
from dlaunch.agent.group import WorkerGroup
from dlaunch.agent.layout import RunDirectory
from dlaunch.agent.meeting import OpenedMeeting, open_meeting
from dlaunch.agent.pump import OutputPump
from dlaunch.agent.starter import Starter
from dlaunch.environ import Meeting, Place, World
from dlaunch.spec import JobSpec, OutputSpec, Program, ProgramKind, StartMethod

from .test_pump import Screen

DEADLINE_S = 60.0
SHOWN = """
import os
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"]
names += ["ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"]
print({name: os.environ[name] for name in names})
"""


class Node:
    """A node with a real starter, as its loop would have it, without the loop."""

    def __init__(self, folder: Path, method: StartMethod, size: int, program: str) -> None:
        (folder / "train.py").write_text(program)
        self.size = size
        self.spec = JobSpec(
            Program(ProgramKind.SCRIPT, str(folder / "train.py"), (), sys.executable),
            output=OutputSpec(log_dir=folder / "logs"),
            start_method=method,
        )
        self.starter = Starter(self.spec, method, size)
        self.selector = selectors.DefaultSelector()
        self.pump = OutputPump(self.spec.output, Screen(), self.selector)
        self.directory = RunDirectory.create(self.spec)
        self._heard: list[frames.Frame] = []
        self.ready = self.says("ready")

    def says(self, kind: str, process_id: int | None = None) -> frames.Frame:
        while True:
            for frame in self._heard:
                if frame["kind"] == kind and process_id in {None, frame.get("id")}:
                    self._heard.remove(frame)
                    return frame
            with selectors.DefaultSelector() as waiting:
                waiting.register(self.starter.socket, selectors.EVENT_READ)
                assert waiting.select(DEADLINE_S), self._heard
            heard = self.starter.read()
            assert heard is not None, self._heard
            self._heard += heard

    def run(self, group: WorkerGroup) -> list[Any]:
        """Run a group to its end; what each worker printed."""
        workers = list(group.spawn(self.starter, self.directory, self.pump))
        for worker in workers:
            exited = self.says("exited", worker.id)
            self.pump.drain(worker.place.local_rank)
            assert exited["status"] == 0, "\n".join(self.pump.tail(worker.place.local_rank, 20))
        printed = [self.pump.tail(worker.place.local_rank, 1)[0] for worker in workers]
        group.close()
        self.pump.close_all()
        self.starter.ask({"kind": "sweep", "gentle_s": 0.0})
        self.says("swept")
        return [ast.literal_eval(line) for line in printed]

    def end(self) -> None:
        self.starter.dismiss()
        self.pump.close_all()
        self.directory.close()
        self.selector.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, StartMethod.EXEC, 2, SHOWN)
    yield made
    made.end()


WORLD = World(group_rank=2, group_world_size=4, base_rank=5, world_size=9, role_base_rank=3, role_world_size=7)


def test_a_place_in_a_world_counts_from_what_other_nodes_have() -> None:
    assert WORLD.place(1, 2, "trainer") == Place(6, 1, 9, 2, 2, 4, "trainer", 4, 7)
    assert [World.alone(2).place(n, 2, "default") for n in range(2)] == [
        Place(n, n, 2, 2, 0, 1, "default", n, 2) for n in range(2)
    ]


def test_workers_of_one_node_of_several_are_told_their_places_and_meet_where_another_node_says(node: Node) -> None:
    group = WorkerGroup(node.spec, node.size, 7, 3, 0, WORLD)
    group.meet_at(Meeting("10.1.2.3", 4711, served_by_agent=True))
    told = node.run(group)
    common = {
        "WORLD_SIZE": "9",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
        "ROLE_WORLD_SIZE": "7",
        "MASTER_ADDR": "10.1.2.3",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }
    assert told == [
        {**common, "RANK": "5", "LOCAL_RANK": "0", "ROLE_RANK": "3"},
        {**common, "RANK": "6", "LOCAL_RANK": "1", "ROLE_RANK": "4"},
    ]
    assert node.directory.path is not None
    assert (node.directory.path / "attempt_7/1/stdout.log").read_text() == f"{told[1]}\n"


def test_rounds_follow_one_another_below_one_starter(node: Node) -> None:
    next_id = 0
    for number in range(3):
        group = WorkerGroup(node.spec, node.size, number, number, next_id, WORLD._replace(base_rank=number))
        next_id = group.next_id
        group.meet_at(Meeting("10.1.2.3", 4711 + number, served_by_agent=False))
        told = node.run(group)
        assert [each["RANK"] for each in told] == [str(number), str(number + 1)]
        assert {each["MASTER_PORT"] for each in told} == {str(4711 + number)}
        assert {each["TORCHELASTIC_USE_AGENT_STORE"] for each in told} == {"False"}


def test_a_node_alone_needs_no_world(node: Node) -> None:
    group = WorkerGroup(node.spec, node.size, 0, 0, 0)
    group.open_meeting(node.starter, starter_serves=node.ready["serves_store"])
    told = node.run(group)
    assert [(each["RANK"], each["WORLD_SIZE"], each["GROUP_WORLD_SIZE"]) for each in told] == [
        ("0", "2", "1"),
        ("1", "2", "1"),
    ]


MEETS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print([dist.get_rank(), dist.get_world_size(), os.environ["MASTER_PORT"]])
"""


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_the_workers_of_two_nodes_meet_at_the_store_that_the_first_has_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    nodes = [Node(folder, StartMethod.WARM, 1, MEETS) for folder in folders]
    try:
        ports = set()
        for number in range(2):
            opened = open_meeting(nodes[0].spec, starter_serves=nodes[0].ready["serves_store"], address="127.0.0.1")
            assert opened.served
            groups = [
                WorkerGroup(node.spec, 1, number, number, 10 * number, World(rank, 2, rank, 2, rank, 2))
                for rank, node in enumerate(nodes)
            ]
            groups[1].meet_at(opened.meeting)
            waiting = list(groups[1].spawn(nodes[1].starter, nodes[1].directory, nodes[1].pump))
            nodes[1].says("started", waiting[0].id)
            groups[0].host(nodes[0].starter, opened)
            assert opened.listener is not None
            assert opened.listener.fileno() == -1, "it is the store's alone"
            assert nodes[0].run(groups[0]) == [[0, 2, str(opened.port)]]
            assert nodes[1].says("exited", waiting[0].id)["status"] == 0
            groups[1].close()
            nodes[1].pump.close_all()
            assert nodes[1].pump.tail(0, 1) == (f"[1, 2, '{opened.port}']",)
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", opened.port)) != 0, "the store of a round ends with it"
            ports.add(opened.port)
        assert len(ports) == 2
    finally:
        for node in nodes:
            node.end()


def test_a_meeting_that_is_not_served_asks_the_starter_for_nothing(node: Node) -> None:
    group = WorkerGroup(node.spec, node.size, 0, 0, 0, WORLD)
    group.host(node.starter, OpenedMeeting("127.0.0.1", 4711, served=False))
    assert {each["TORCHELASTIC_USE_AGENT_STORE"] for each in node.run(group)} == {"False"}
