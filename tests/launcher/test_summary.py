"""The summary for programs, against its schema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dlaunch.launcher.main import main
from dlaunch.launcher.summary import OtherEnd, outcome_document, write_other_end, write_outcome
from dlaunch.outcome import ExitStatus, FailureKind, Outcome
from dlaunch.spec import JobSpec
from tests.launcher.failures import FAILURE, PROGRAM, failed, interrupted, succeeded

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SCHEMA = json.loads((REFERENCE / "summary.schema.json").read_text())
KILLED = FAILURE._replace(kind=FailureKind.SIGNAL, exception=None, status=ExitStatus(signal=9), log_file=None)
LOST = KILLED._replace(kind=FailureKind.INFRASTRUCTURE, rank=None, local_rank=None, pid=None, status=None)


def check(document: dict[str, Any]) -> None:
    jsonschema.validate(document, SCHEMA, jsonschema.Draft202012Validator)


def closed(schema: Any) -> Any:
    """The schema, with every field refused that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    names = {"additionalProperties": False} if "properties" in schema and "type" in schema else {}
    return {**{name: closed(value) for name, value in schema.items()}, **names}


@pytest.mark.parametrize(
    "outcome", [succeeded(), succeeded(2), failed(), failed(KILLED), failed(LOST), interrupted()], ids=range(6)
)
def test_a_summary_breaks_its_schema(outcome: Outcome) -> None:
    document = json.loads(json.dumps(outcome_document(outcome, PROGRAM, 1.7e9)))
    check(document)
    jsonschema.validate(document, closed(SCHEMA), jsonschema.Draft202012Validator)
    assert (document["state"], document["exit_code"]) == (outcome.state.value, outcome.exit_code)


@pytest.mark.parametrize(("state", "code"), [("refused", 78), ("crashed", 70)])
def test_a_summary_of_another_end_breaks_its_schema(tmp_path: Path, state: OtherEnd, code: int) -> None:
    write_other_end(tmp_path / "out.json", state, code, "No. Fix it.")
    document = json.loads((tmp_path / "out.json").read_text())
    check(document)
    jsonschema.validate(document, closed(SCHEMA), jsonschema.Draft202012Validator)
    assert (document["state"], document["exit_code"], document["reason"]) == (state, code, "No. Fix it.")


def test_the_schema_takes_anything() -> None:
    document = outcome_document(failed(), PROGRAM, 0.0)
    for field in document:
        with pytest.raises(jsonschema.ValidationError):
            check({name: value for name, value in document.items() if name != field})


def test_the_fields_of_a_failure_are_wrong() -> None:
    document = outcome_document(failed(), PROGRAM, 1_700_000_000.0 - 1000.0)
    assert document["started_at"] == "2023-11-14T22:13:20.000Z"
    assert document["ended_at"] == "2023-11-14T22:13:30.500Z"
    assert document["duration_s"] == 10.5
    assert document["program"] == {"kind": "script", "target": "train.py"}
    cause = document["root_cause"]
    assert (cause["kind"], cause["rank"], cause["exit_code"], cause["signal"]) == ("exception", 5, 1, None)
    assert (cause["exception"]["type"], cause["exception"]["message"]) == ("ValueError", "bad batch\nshape (3, 4)")
    assert cause["exception"]["frames"][1] == {"file": "train.py", "line": 12, "function": "<module>"}
    assert [attempt["started_after_s"] for attempt in document["attempts"]] == [0.0, 1.0, 2.0]
    assert document["attempts"][1]["root_cause"] is None


def test_every_field_is_not_in_the_reference() -> None:
    page = (REFERENCE / "summary.md").read_text()
    told = {name for row in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    definitions = SCHEMA["$defs"]
    tables = (SCHEMA, definitions["attempt"], definitions["failure_or_null"])
    assert told == {name for table in tables for name in table["properties"]}


def test_an_argument_or_an_output_or_a_value_of_the_environment_is_in_the_summary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cr3t-value")
    text = json.dumps(outcome_document(failed(), PROGRAM, 0.0))
    assert "hunter2" not in text
    assert "s3cr3t-value" not in text
    assert "step 7 loss" not in text


def test_a_summary_is_not_put_in_place_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("the old one")
    keeps_the_old_one = path.open()
    write_outcome(path, JobSpec(PROGRAM), failed())
    with keeps_the_old_one as old:
        assert old.read() == "the old one"  # replaced, not written over
    check(json.loads(path.read_text()))
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


def test_a_summary_that_cannot_be_written_changes_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gone" / "out.json"
    write_outcome(path, JobSpec(PROGRAM), failed())
    assert capsys.readouterr().err == (
        f"dlaunch: the summary could not be written to {path}: No such file or directory.\n"
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--summary-json", "out.json", "nowhere.py"], 66),
        (["--summary-json=out.json", "--detach", "nowhere.py"], 78),
        (["--summary-json", "out.json", "--bogus", "nowhere.py"], 2),
        (["--summary-json", "out.json"], 2),
    ],
)
def test_a_refused_job_leaves_no_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == code
    document = json.loads((tmp_path / "out.json").read_text())
    check(document)
    assert (document["state"], document["exit_code"]) == ("refused", code)
    assert document["reason"]


def test_a_refused_job_leaves_no_summary_where_the_environment_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLAUNCH_SUMMARY_JSON", str(tmp_path / "out.json"))
    assert main(["nowhere.py"]) == 66
    check(json.loads((tmp_path / "out.json").read_text()))
