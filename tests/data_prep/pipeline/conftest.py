import json
import shutil
from pathlib import Path

import pytest

from tests.data_prep.pipeline.small_recipe import TEXTS


@pytest.fixture
def recipe(tmp_path, tokenizer_directory) -> Path:
    """Write documents, two of them the same and three too short, and a recipe for them."""
    shutil.copytree(tokenizer_directory, tmp_path / "tokenizer")
    (tmp_path / "raw").mkdir()
    records = [{"text": text, "source": "a", "n": 2**70} for text in [*TEXTS, TEXTS[3]]]
    records += [{"text": word, "id": f"short-{word}"} for word in ("no", "nor", "so")]
    for part in range(2):
        lines = [json.dumps(record) for record in records[part::2]]
        (tmp_path / "raw" / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    content = {
        "output": "out",
        "sources": {"web": {"input": ["raw/*.jsonl"]}},
        "clean": {"filters": [{"filter": "length", "min_words": 5}], "unit_bytes": 4000},
        "dedup": {"near": False},
        "tokenize": {"tokenizer": "tokenizer", "val_fraction": 0.2, "encoder": "tokenizers"},
    }
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(content))
    return path
