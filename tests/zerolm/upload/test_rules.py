"""Checks of --upload_to before a run starts."""

import json
from pathlib import Path

from tests.zerolm.upload.published import publish
from zerolm.common.store import StoreError
from zerolm.parts.parse import parse_settings
from zerolm.parts.settings import RunSettings
from zerolm.upload import uploader
from zerolm.upload.rules import is_lost, stored_record, upload_problems
from zerolm.upload.run_store import Store


def settings(*argv: object) -> RunSettings:
    parsed, problems = parse_settings([str(word) for word in argv])
    assert not problems
    return parsed


def test_a_copied_run_does_not_overwrite_the_store_of_the_original(tmp_path) -> None:
    record = {"settings": {"run_dir": "runs/first", "upload_to": f"file://{tmp_path}/first"}}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(record))
    assert upload_problems(settings("--settings", file)) == []
    assert upload_problems(settings("--settings", file, "--run_dir", "runs/first")) == []
    (problem,) = upload_problems(settings("--settings", file, "--run_dir", "runs/second"))
    assert "belongs to the run in runs/first, but --run_dir is runs/second" in problem
    for place in (f"file://{tmp_path}/second", "off"):
        words = ["--settings", file, "--run_dir", "runs/second", "--upload_to", place]
        assert upload_problems(settings(*words)) == []


def test_the_record_that_a_restore_would_fetch_is_read_before_it(tmp_path) -> None:
    run_dir, url = tmp_path / "run", f"file://{tmp_path}/store"
    run_dir.mkdir()
    problems: list[str] = []
    words = ["--run_dir", tmp_path / "again", "--upload_to", url]
    assert stored_record(settings(*words), problems) is None, "an empty store"
    publish(run_dir, 5)
    publish(run_dir, 10)
    uploader.upload(run_dir, url, keep=0)
    found = stored_record(settings(*words), problems)
    assert found is not None and found[0] == f"{url}/step-00000010/record/run.json"
    assert found[1] == {"settings": {"seed": 10}}
    assert stored_record(settings("--run_dir", run_dir, "--upload_to", url), problems) is None
    assert problems == []


def test_a_store_that_does_not_answer_is_a_problem_only_without_a_checkpoint(
    tmp_path, monkeypatch
) -> None:
    def fail(*words: object) -> list[str]:
        raise StoreError("s3://bucket/first: no answer")

    monkeypatch.setattr(Store, "complete", fail)
    run_dir, problems = tmp_path / "run", list[str]()
    words = ["--run_dir", run_dir, "--upload_to", f"file://{tmp_path}/store"]
    assert stored_record(settings(*words), problems) is None
    assert "might restart at step 0. s3://bucket/first: no answer." in problems[0]
    run_dir.mkdir()
    publish(run_dir, 5)
    problems.clear()
    assert stored_record(settings(*words), problems) is None and problems == []


def test_a_run_without_checkpoints_is_lost_even_with_a_pointer_file(tmp_path) -> None:
    assert is_lost(tmp_path)
    directory: Path = publish(tmp_path, 5)
    assert not is_lost(tmp_path)
    (directory / "MANIFEST.json").write_text("{")
    assert is_lost(tmp_path)
