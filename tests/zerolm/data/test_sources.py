"""Sources from the values of `--data`."""

from zerolm.data.sources import open_sources
from zerolm.parts.settings import RunSettings


def test_a_url_that_is_cut_at_an_equals_sign_says_how_to_keep_it():
    found = {}
    for given in ("memory://shards/day=20260101", "memory://shards/day=20260101/"):
        problems: list[str] = []
        open_sources(RunSettings(data=(given,), seq_len=8), problems)
        found[given] = " ".join(problems)
    assert "a name with an equals sign must end with /" in found["memory://shards/day=20260101"]
    assert "equals sign" not in found["memory://shards/day=20260101/"]
    assert "day=20260101" in found["memory://shards/day=20260101/"]
