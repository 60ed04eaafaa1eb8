"""A refusal that asks to remove a value of a file names the flag that does it."""

import json

import pytest

from zerolm.parts.inheritance import with_origins
from zerolm.parts.parse import parse_settings
from zerolm.parts.settings import FLAGS, RunSettings

VALUES = {"fp8": True, "init_from": "model", "parametrization": "completep", "seq_len": 64}


@pytest.fixture
def settings(tmp_path) -> RunSettings:
    (tmp_path / "run.json").write_text(json.dumps({"settings": VALUES}))
    found, problems = parse_settings(["--settings", str(tmp_path / "run.json"), "--compile"])
    assert not problems
    return found


def hint(settings: RunSettings, problem: str) -> str:
    (found,) = with_origins([problem], settings)
    assert found.startswith(problem)
    return found.removeprefix(problem).partition(" removes the value set in ")[0].strip()


def test_the_subject_and_the_flags_before_the_fix_are_named(settings):
    fp8, scale = settings.where("fp8"), settings.where("parametrization")
    assert hint(settings, f"{fp8}: true needs a GPU. Remove the flag.") == "--no-fp8"
    assert hint(settings, f"{scale}: completep has another scale. Remove --init_from, or the "
                          "flag.") == "--no-init_from or --no-parametrization"  # fmt: skip
    assert hint(settings, f"{fp8}: true does not work with this. Use bf16, or remove this setting.")
    assert hint(settings, f"{fp8}: true contradicts the key. Remove one of them.") == "--no-fp8"
    assert hint(settings, f"{fp8}: true needs masters. Remove the_key, or the flag.") == "--no-fp8"
    assert hint(settings, "command line: --compile: not supported together with --fp8. Remove one "
                          "of the flags.") == "--no-fp8"  # fmt: skip


def test_what_was_written_or_is_recommended_is_not(settings):
    for problem in (
        "command line: --compile: true needs a GPU. Remove the flag.",
        f"{settings.where('seq_len')}: 64 must be larger. Raise it.",
        "command line: --compile: has no effect without --fp8. Add it, or remove the flag.",
        f"{settings.where('fp8')}: true. Remove it (--no-fp8).",
        "ds.json: fp16.enabled: true does not work with --fp8. Remove the block.",
        "ds.json: torch_autocast.enabled: true does not work with --fp8. Remove torch_autocast.",
        "ds.json: scheduler: sets the rates of --fp8. Remove the scheduler block, and use --x.",
        "ds.json: fp16.enabled: true does not work with --fp8, whose scales drop to 0.",
        "data: row 7 is not text for --seq_len. Correct it, or remove the row.",
    ):
        assert hint(settings, problem) == ""


def test_every_flag_of_a_file_has_a_no_form(tmp_path):
    saved = [name for name, about in FLAGS.items() if about["saved"]]
    arguments = [f"--no-{name}" for name in saved]
    assert parse_settings(arguments)[1] == []


def test_a_path_of_a_file_is_named_with_its_key(settings, tmp_path):
    where = f"{tmp_path / 'run.json'}: settings.init_from"
    for problem in ("model: no such directory.", "model/config.json: is empty.",
                    "--init_from model: no such directory."):  # fmt: skip
        assert with_origins([problem], settings) == [f"{problem} ({where})"]
    assert with_origins(["models: no such directory."], settings) == ["models: no such directory."]


def test_a_source_of_a_file_is_named_without_its_flag(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"data": ["web=0.5", "code"]}))
    found, _ = parse_settings(["--settings", str(path), "--val_data", "web-val"])
    problems = ["web: no such directory. (--data)", "web-val: no such directory. (--val_data)"]
    assert with_origins(problems, found) == [
        f"web: no such directory. ({path}: settings.data)",
        problems[1],
    ]
