"""Fixed stories of one cluster each, with the end that each must have."""

from __future__ import annotations

import pytest

from dlaunch.simulation.run import simulate
from dlaunch.simulation.scenario import SCENARIOS, complaints


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_story_ends_as_it_must(name: str) -> None:
    scenario = SCENARIOS[name]
    found = complaints(scenario, simulate(scenario.plan))
    assert not found, f"{scenario.says}: {found}\n{simulate(scenario.plan, tells=True).story.text()}"
