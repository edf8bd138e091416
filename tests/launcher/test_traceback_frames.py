"""Whose frames are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

import dlaunch.launcher.report
from dlaunch.launcher.traceback_frames import own_frames
from dlaunch.outcome import TracebackFrame

OWN = ["train.py", "/home/me/project/model.py", "/home/me/lib/model.py", "<string>"]
LIBRARY = [
    "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py",
    "/usr/lib/python3/dist-packages/yaml/__init__.py",
    "/usr/lib/python3.12/json/decoder.py",
    "/opt/conda/lib64/python3.10/runpy.py",
    "<frozen runpy>",
    "<frozen importlib._bootstrap>",
]
OURS = ["/opt/dlaunch/worker/starter.py", "/opt/dlaunch/parallel/ddp/naive.py"]


def shown(*files: str) -> list[str]:
    frames = tuple(TracebackFrame(file, 1, "f") for file in files)
    return [frame.file for frame in own_frames(frames, ours=["/opt/dlaunch/"])]


def test_frames_of_others_stand_between_those_of_the_script() -> None:
    assert shown(OURS[0], OWN[0], LIBRARY[0], OWN[1], LIBRARY[2], OWN[2], OWN[3], OURS[1]) == OWN


@pytest.mark.parametrize("file", LIBRARY)
def test_a_frame_of_a_library_counts_as_the_scripts(file: str) -> None:
    assert shown("train.py", file) == ["train.py"]


def test_nothing_is_shown_where_only_libraries_have_frames() -> None:
    assert shown(OURS[0], *LIBRARY) == LIBRARY


def test_a_frame_of_dlaunch_is_shown_where_there_is_no_other() -> None:
    assert shown(*OURS) == []


def test_the_folders_of_dlaunch_are_not_known() -> None:
    behind_a_link = dlaunch.launcher.report.__file__
    for file in (behind_a_link, str(Path(behind_a_link).resolve()), dlaunch.__file__):
        assert own_frames([TracebackFrame(file, 1, "f"), TracebackFrame("train.py", 1, "f")])[0].file == "train.py"
