"""A short chunk of the campaign, with the features that no other test kills together."""

from pathlib import Path

import pytest

from tests.soak import configurations, log
from tests.soak.campaign import Campaign


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_packed_run_with_muon_and_an_average_equals_itself_after_three_kills(tmp_path):
    kinds = ["writer", "machine", "while starting"]
    require_equal_after_kills(tmp_path, "zero1-bf16-muon-packed", kinds, steps=250)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_run_with_unequal_stages_equals_itself_after_three_kills(tmp_path):
    kinds = ["writer", "one rank", "while starting"]
    require_equal_after_kills(tmp_path, "zero2-fp32-stages-packed", kinds, steps=120)


def require_equal_after_kills(base: Path, name: str, kinds: list[str], steps: int) -> None:
    """Train a configuration with a kill of each kind."""
    (configuration,) = [each for each in configurations.ROTATION if each.name == name]
    campaign = Campaign(
        base / "campaign", base / "kills.jsonl", num_kills=1, steps=steps, kinds=kinds,
        rotation=[configuration], count=len(kinds),
    )  # fmt: skip
    campaign.run(parallel=1)
    (chunk,) = log.read(base / "kills.jsonl")
    assert chunk["differences"] == chunk["problems"] == []
    assert {kill["kind"] for kill in chunk["kills"]} >= {*kinds}, chunk["kills"]
