import json

from data_prep.stages.counts import MAX_EXAMPLES, Counts, merge_counts


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
