"""Scores of a model in one recipe, and thresholds in another, compared with brute force."""

import json
import random
from pathlib import Path

from data_prep.__main__ import main
from tests.data_prep.filters.test_score_filters import BAD, GOOD, train_model
from tests.data_prep.stage_cases import documents_of


def write_recipe(directory: Path, name: str, sources: list[str], **keys) -> Path:
    path = directory / f"{name}.json"
    content = {"output": name, "sources": {"web": {"input": sources}}, **keys}
    path.write_text(json.dumps(content))
    return path


def test_thresholds_are_applied_to_stored_scores(tmp_path, capsys):
    generator = random.Random(3)
    words = f"{GOOD} {BAD}".split()
    texts = [" ".join(generator.choices(words, k=generator.randrange(3, 60))) for _ in range(300)]
    for part in range(3):
        records = [{"id": f"{part}-{n}", "text": text} for n, text in enumerate(texts[part::3])]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{part}.jsonl").write_text(lines)
    train_model(tmp_path / "quality.bin")
    filters = [{"filter": "fasttext", "model": "quality.bin"}]
    clean = {"filters": filters, "unit_bytes": 20000}
    scored = write_recipe(tmp_path, "scored", ["?.jsonl"], clean=clean)
    assert main(["run", str(scored), "--workers", "1"]) == 0
    documents = documents_of(tmp_path / "scored/web/clean")
    assert len(documents) == 300  # none is dropped

    (tmp_path / "quality.bin").rename(tmp_path / "gone.bin")
    capsys.readouterr()
    assert main(["run", str(scored), "--check"]) == 2
    assert "quality.bin: no such file" in capsys.readouterr().err
    for low in (0.4, 0.3):
        clean = {"filters": [{"filter": "score", "key": "scores.quality.hq", "min": low}]}
        given = write_recipe(tmp_path, f"chosen{low}", ["scored/web/clean"], clean=clean)
        assert main(["run", str(given), "--workers", "1"]) == 0  # no model is read
        chosen = [each for each in documents if each["scores"]["quality.hq"] >= low]
        assert 20 < len(chosen) < 290
        assert documents_of(tmp_path / f"chosen{low}/web/clean") == chosen
