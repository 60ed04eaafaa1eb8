import json

import pytest

from data_prep.__main__ import main
from data_prep.stages.counts import MAX_EXAMPLES, Counts, merge_counts
from tests.data_prep.stage_cases import documents_of


def test_counts_of_tasks_add_up(tmp_path):
    records = []
    for task in range(3):
        counts = Counts()
        for number in range(4):
            counts.add_input(100)
            counts.add_dropped("short", 100, f"{task}-{number}", "x" * 500)
        counts.add_input(3)
        counts.add_output(3)
        records.append(counts.record())
    merged = merge_counts(json.loads(json.dumps(records)))
    assert merged["documents_in"] == 15
    assert merged["documents_out"] == 3
    assert merged["dropped"] == {"short": 12}
    assert merged["dropped_bytes"] == {"short": 1200}
    assert merged["lengths_in"] == {"2": 3, "64": 12}
    assert [example["id"] for example in merged["examples"]["short"]] == ["0-0", "0-1", "0-2"]
    assert len(merged["examples"]["short"]) == MAX_EXAMPLES
    assert len(merged["examples"]["short"][0]["text"]) == 200


@pytest.mark.parametrize("stage", ["clean", "dedup"])
def test_a_document_without_an_id_gets_its_place(stage, tmp_path):
    """Also where the id is null or empty, as tables write it."""
    pytest.importorskip("datatrove")
    ids = ["", '"id": null, ', '"id": "", ', '"id": 0, ', '"id": "x", ']
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{{each}"text": "text {n}"}}\n' for n, each in enumerate(ids)))
    (tmp_path / "f.json").write_text('[{"filter": "length", "min_words": 1}]')
    own = {"clean": ["--filters", str(tmp_path / "f.json")], "dedup": ["--near", "off"]}[stage]
    output = ["--output", str(tmp_path / "out"), "--workers", "1"]
    assert main([stage, "--input", str(path), *output, *own]) == 0
    found = [record["id"] for record in documents_of(tmp_path / "out")]
    assert found == [f"{path}:0", f"{path}:19", f"{path}:50", 0, "x"]
