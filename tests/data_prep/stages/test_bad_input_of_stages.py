"""Every stage has the same flags for bad input as `tokenize`, and the same counts."""

import json
from pathlib import Path

import pytest

from data_prep.__main__ import main
from tests.data_prep.read.bad_input_cases import CASES, HARMLESS, LIMIT


def arguments_of(stage: str, directory: Path) -> list[str]:
    own = {
        "clean": ("--filters", str(directory / "filters.json")),
        "dedup": ("--near", "off"),
        "decontaminate": ("--evaluation", str(directory / "evaluation.jsonl")),
    }
    output = str(directory / stage)
    words = [stage, "--input", str(directory / "corpus"), "--output", output, *own[stage]]
    return [*words, "--max_document_bytes", str(LIMIT), "--max_expansion", "100"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("bad")
    (directory / "corpus").mkdir()
    for name, case in (CASES | HARMLESS).items():
        (directory / "corpus" / name).write_bytes(case.content)
    (directory / "filters.json").write_text("[]")
    (directory / "evaluation.jsonl").write_text('{"text": "no such words are in any document"}\n')
    return directory


@pytest.mark.parametrize("stage", ["clean", "dedup", "decontaminate", "run"])
def test_bad_input_is_counted_by_every_stage_as_tokenize_does(stage, directory, capsys):
    pytest.importorskip("datatrove")
    expected: dict[str, dict[str, int]] = {"bad": {}, "skipped": {}}
    for case in (CASES | HARMLESS).values():
        for key, counts in expected.items():
            for reason, count in getattr(case, key).items():
                counts[reason] = counts.get(reason, 0) + count
    limits = {"max_document_bytes": LIMIT, "max_expansion": 100}
    source = {"input": ["corpus"], "on_bad_input": "skip", **limits}
    recipe = directory / "recipe.json"

    def run(fraction: float | None) -> int:
        more = {} if fraction is None else {"max_bad_fraction": fraction}
        recipe.write_text(json.dumps({"output": "out", "sources": {"a": {**source, **more}}}))
        if stage == "run":
            return main(["run", str(recipe), "--workers", "1"])
        words = [*arguments_of(stage, directory), "--workers", "1", "--on_bad_input", "skip"]
        return main(words + ["--max_bad_fraction", str(fraction)] * (fraction is not None))

    assert run(None) == 2
    assert "more than --max_bad_fraction 0.01" in capsys.readouterr().err
    output = directory / ("out/a/clean" if stage == "run" else stage)
    files = {path: path.stat().st_mtime_ns for path in output.glob("0*.jsonl.zst")}
    assert files and run(1) == 0
    assert {path: path.stat().st_mtime_ns for path in files} == files  # nothing is written again
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    manifest = json.loads((output / "stage.json").read_text())
    found = manifest.get("reading") or {
        "bad": manifest["bad_documents"],
        "skipped": manifest["skipped_documents"],
    }
    assert {key: found[key] for key in expected} == expected
    if stage != "run":
        assert "lines that are not JSON" in shown.out
    else:
        assert f"skipped {sum(expected['bad'].values())} that could not be read" in shown.out
