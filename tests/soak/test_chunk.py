"""A short chunk of the campaign, with the features that no other test kills together."""

import pytest

from tests.soak import configurations, log
from tests.soak.campaign import Campaign


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_packed_run_with_muon_and_an_average_equals_itself_after_three_kills(tmp_path):
    (muon,) = [each for each in configurations.ROTATION if each.muon]
    campaign = Campaign(
        tmp_path / "campaign", tmp_path / "kills.jsonl", num_kills=1, steps=250, rotation=[muon],
        kinds=["writer", "machine", "while starting"], count=3,
    )  # fmt: skip
    campaign.run(parallel=1)
    (chunk,) = log.read(tmp_path / "kills.jsonl")
    assert chunk["differences"] == chunk["problems"] == []
    found = {kill["kind"] for kill in chunk["kills"]}
    assert found >= {"writer", "machine", "while starting"}, chunk["kills"]
