"""A refusal that asks to remove a value of a file names the flag that takes it back."""

import json

import pytest

from zerolm.config.flags import parse_settings
from zerolm.config.inheritance import with_no_forms
from zerolm.config.settings import FLAGS, Settings

VALUES = {"fp8": True, "init_from": "model", "parametrization": "completep", "seq_len": 64}


@pytest.fixture
def settings(tmp_path) -> Settings:
    (tmp_path / "run.json").write_text(json.dumps({"settings": VALUES}))
    found, problems = parse_settings(["--settings", str(tmp_path / "run.json"), "--compile"])
    assert not problems
    return found


def hint(settings: Settings, problem: str) -> str:
    (found,) = with_no_forms([problem], settings)
    assert found.startswith(problem)
    return found.removeprefix(problem).partition(" takes back what ")[0].strip()


def test_the_subject_and_the_flags_before_the_fix_are_named(settings):
    fp8, scale = settings.where("fp8"), settings.where("parametrization")
    assert hint(settings, f"{fp8}: true, needs a GPU. Remove the flag.") == "--no-fp8"
    assert hint(settings, f"{scale}: completep, has another scale. Remove --init_from, or the "
                          "flag.") == "--no-init_from or --no-parametrization"  # fmt: skip
    assert hint(settings, "command line: --compile: not supported together with --fp8. Remove one "
                          "of the flags.") == "--no-fp8"  # fmt: skip


def test_what_was_written_or_is_recommended_is_not(settings):
    for problem in (
        "command line: --compile: true, needs a GPU. Remove the flag.",
        f"{settings.where('seq_len')}: 64, must be larger. Raise it.",
        "command line: --compile: has no effect without --fp8. Add it, or remove the flag.",
        f"{settings.where('fp8')}: true. Remove it (--no-fp8).",
        "ds.json: fp16.enabled: true, not with --fp8. Remove the block.",
    ):
        assert hint(settings, problem) == ""


def test_every_flag_of_a_file_has_a_no_form(tmp_path):
    saved = [name for name, about in FLAGS.items() if about["saved"]]
    arguments = [f"--no-{name}" for name in saved]
    assert parse_settings(arguments)[1] == []
