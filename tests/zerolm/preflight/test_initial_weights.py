"""`--init_from`: which source is meant, and which runs may not start from it."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, processors

from tests.launching import ROOT, write_json
from tests.zerolm.preflight.preflight_inputs import shards
from tests.zerolm.pretrained.small_models import change_tensors, save_model
from zerolm.common.errors import ConfigError
from zerolm.export.tokenizer import generation_of
from zerolm.preflight import check
from zerolm.pretrained.initial_source import InitialSource
from zerolm.run_dir.files import RunFiles
from zerolm.train import run_directory


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model")
    shards(tmp_path / "data", vocab_size=64)
    return tmp_path


def command(source="model", data="data", **more) -> list[str]:
    flags = {
        "deepspeed_config": ROOT / "ds_configs" / "zero2.json", "data": data,
        "init_from": source, "run_dir": "run", "seq_len": 16, "batch_tokens": 64,
        "total_tokens": 640, "wandb": "off", **more,
    }  # fmt: skip
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def plan_of(*args, **more):
    return check.check(command(*args, **more), {"WORLD_SIZE": "1"})


def refusal(*args, **more) -> str:
    with pytest.raises(ConfigError) as refused:
        plan_of(*args, **more)
    return str(refused.value)


def with_tokenizer(directory, words: str, template: str = "$A"):
    vocabulary = {word: number for number, word in enumerate(words.split())}
    directory.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words.split()[-1]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template,
        special_tokens=[(word, vocabulary[word]) for word in template.split() if word != "$A"],
    )
    tokenizer.save(str(directory / "tokenizer.json"))


def test_the_config_of_the_source_is_used(base) -> None:
    plan = plan_of()
    assert plan.model.config.hidden_size == 32
    assert plan.settings.init_from == "model" and plan.settings.model_config is None
    assert plan.derived["initial weights"].startswith("from model: 1 file(s), ")
    assert any("--init_from model: has no tokenizer" in notice for notice in plan.notices)


def test_a_router_loss_that_an_export_turns_off_is_named(base) -> None:
    save_model(base / "routed", "mixtral")
    notice = "--init_from routed: output_router_logits is false in its config.json, so this run has"
    assert any(line.startswith(notice) for line in plan_of("routed").notices)
    values = json.loads((base / "routed" / "config.json").read_text())
    on = write_json(base / "on.json", {**values, "output_router_logits": True})
    assert not any(notice in line for line in plan_of("routed", model_config=on).notices)
    write_json(base / "routed" / "config.json", {**values, "router_aux_loss_coef": 0.0})
    assert not any(notice in line for line in plan_of("routed").notices)


def test_a_config_that_differs_is_refused_with_keys_and_values(base) -> None:
    values = json.loads((base / "model" / "config.json").read_text())
    write_json(base / "other.json", {**values, "hidden_act": "gelu", "rms_norm_eps": 1e-3})
    text = refusal(model_config="other.json")
    assert 'other.json: hidden_act: "gelu", --init_from model has "silu". Give the' in text
    assert "other.json: rms_norm_eps: 0.001, --init_from model has 1e-06" in text


@pytest.mark.parametrize("given", [False, True])
def test_a_larger_vocabulary_is_named_in_the_plan(base, given) -> None:
    shards(base / "wide", vocab_size=70)
    values = json.loads((base / "model" / "config.json").read_text())
    larger = write_json(base / "larger.json", {**values, "vocab_size": 70})
    plan = plan_of(data="wide", **({"model_config": larger} if given else {}))
    assert plan.model.vocab_size == 70
    assert plan.derived["initial weights"].endswith(
        "; rows 64 to 69 of lm_head.weight, model.embed_tokens.weight are new"
    )


@pytest.mark.parametrize(
    ("ours", "problem"),
    [("a b c", ""), ("a b c d", ""), ("a c b", "2 of 3 common tokens have other ids: 'b' is 2")],
)
def test_shards_of_another_tokenizer_are_refused(base, ours, problem) -> None:
    with_tokenizer(base / "model", "a b c")
    with_tokenizer(base / "data" / "tokenizer", ours)
    if problem:
        text = refusal()
        assert f"data: its tokenizer differs from that of --init_from model: {problem}" in text
    else:
        assert not any("--init_from" in notice for notice in plan_of().notices)


def test_weights_that_begin_and_end_texts_otherwise_are_named(base) -> None:
    with_tokenizer(base / "data" / "tokenizer", "<eot> <bos> <im_end>")
    with_tokenizer(base / "model", "<eot> <bos> <im_end>", "<bos> $A")
    values = json.loads((base / "model" / "config.json").read_text())
    (base / "model" / "generation_config.json").unlink()
    for ends, is_named in ((0, False), ([2, 0], False), (2, True), (None, False)):
        write_json(base / "model" / "config.json", {**values, "eos_token_id": ends})
        notices = [line for line in plan_of().notices if line.startswith("--init_from model: ")]
        end = "its eos_token_id is <im_end> (id 2), but documents in data end with <eot> (id 0)"
        begin = "begins texts with <bos> (id 1), but documents in data begin with no BOS"
        assert [any(part in line for line in notices) for part in (end, begin)] == [is_named, True]
    write_json(base / "model" / "config.json", {**values, "eos_token_id": 2})
    config = write_json(base / "named.json", {**values, "eos_token_id": 2, "bos_token_id": 1})
    named = [line for line in plan_of(model_config=config).notices if "named.json" in line]
    assert [line.split(": ", 1)[1] for line in named] == [
        "eos_token_id: 2, but documents in data end with id 0, which an export has instead"
    ]
    with_tokenizer(base / "data" / "tokenizer", "<eot> <bos> <im_end>", "<bos> $A <eot>")
    notices = plan_of().notices
    assert any("the tokenizer puts <bos> (id 1) before each text" in line for line in notices)
    assert any("the tokenizer puts <eot> (id 0) after each text" in line for line in notices)
    assert not any("begins texts with" in line for line in notices)  # it is said once


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("data/nothing", "no such directory. Give a Hugging Face model directory"),
        ("model/config.json", "--init_from model/config.json: is a file. Give a Hugging Face"),
        ("no/such/directory", "no such directory. Give a Hugging Face model directory"),
        ("someone/model", "nor a model that the Hugging Face client can fetch or find in its"),
        ("data", "data: contains neither model.safetensors nor model"),
        ("run@12", "run has no complete checkpoint of step 12"),
    ],
)
def test_a_source_that_is_none_is_refused(base, source, expected) -> None:
    (base / "run" / "checkpoints").mkdir(parents=True)
    assert expected in refusal(source)


def test_all_problems_of_a_source_are_reported_at_once(base) -> None:
    change_tensors(base / "model", **{"model.norm.weight": None, "lm_head.weight": None})
    text = refusal(batch_tokens=63)
    assert "lm_head.weight, model.norm.weight: missing" in text and "batch_tokens" in text


def started(base):
    """Write the run.json of a run that has no checkpoint yet; return its plan."""
    plan = plan_of()
    path = RunFiles(plan.run_dir).record
    path.parent.mkdir()
    write_json(path, run_directory.record(plan))
    return plan


def test_a_restart_before_the_first_checkpoint_needs_the_same_weights(base) -> None:
    record = RunFiles(started(base).run_dir).record
    assert not plan_of().changed
    (base / "model").rename(base / "moved")
    assert not plan_of("moved").changed, "the same weights in another place"
    changed = refusal("moved", seed=1)
    assert "settings.seed: 0 -> 1" in changed and "init_from: model" not in changed
    content = json.loads(record.read_text())
    for digest in ("0" * 64, "f" * 64):
        other = {**content, "initial_weights": {**content["initial_weights"], "digest": digest}}
        write_json(record, other)
        assert "settings.init_from: model -> moved" in refusal("moved")
    write_json(record, content)
    change_tensors(base / "moved", **{"model.norm.weight": torch.ones(32)})
    assert "cannot be carried over: the run was initialized with" in refusal("moved")
    (base / "moved").rename(base / "model")
    with pytest.raises(ConfigError, match=r"initial_weights\.digest: .* cannot be carried over"):
        check.check([*command(), "--accept_changes"], {"WORLD_SIZE": "1"})


def test_a_run_with_a_checkpoint_does_not_read_its_source(base) -> None:
    started(base)
    (base / "run" / "checkpoints" / "step-00000010").mkdir(parents=True)
    (base / "model").rename(base / "moved")
    plan = plan_of()
    assert plan.initial.weights is None and plan.initial.source == "model"
    assert plan.model.config.hidden_size == 32
    assert "settings.init_from: model -> moved" in refusal("moved")


def test_settings_of_a_run_start_another_from_the_same_weights(base) -> None:
    plan = started(base)
    flags = ["--settings", str(RunFiles(plan.run_dir).record), "--run_dir", "second"]
    again = check.check(flags, {"WORLD_SIZE": "1"})
    assert replace(again.initial, weights=None) == replace(plan.initial, weights=None)
    assert again.settings.init_from == "model"


def test_only_a_run_has_optimizer_states_to_start_with(base) -> None:
    with pytest.raises(ConfigError, match=r"--init_optimizer: needs --init_from RUN\[@STEP\]"):
        check.check([*command(), "--init_optimizer"], {})
    flags = [word for word in command() if word not in ("--init_from", "model")]
    with pytest.raises(ConfigError, match=r"--init_optimizer: needs --init_from RUN\[@STEP\]"):
        check.check([*flags, "--model_config", "model/config.json", "--init_optimizer"], {})


def test_a_hub_id_is_read_from_the_cache_and_recorded_with_its_commit(base, monkeypatch) -> None:
    commit = "0123456789012345678901234567890123456789"
    repository = base / "hub" / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(base / "model", repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(base / "hub"))
    plan = plan_of("someone/model")
    assert plan.settings.init_from == plan.initial.source == f"someone/model@{commit}"
    assert plan.initial.hub_id == "someone/model"
    assert plan_of(f"someone/model@{commit}").initial.digest == plan.initial.digest
    assert "nor a model that the Hugging Face client can" in refusal("someone/model@other")


def test_the_values_of_generation_of_the_source_are_recorded(base) -> None:
    values = json.loads((base / "model" / "config.json").read_text())
    write_json(
        base / "model" / "config.json", {**values, "bos_token_id": 4, "eos_token_id": [5, 6]}
    )
    sampling = {"temperature": 0.6, "do_sample": True, "eos_token_id": 7}
    write_json(
        base / "model" / "generation_config.json", {**sampling, "transformers_version": "4.40.0"}
    )
    plan = started(base)
    expected = {**sampling, "bos_token_id": 4, "eos_token_id": [7, 5, 6]}
    assert generation_of(base / "run") == expected
    record = run_directory.record(plan)["initial_weights"]
    assert InitialSource.recorded(record).record() == record, "a resume, and a branch"
    del record["generation"]
    assert InitialSource.recorded(record).generation == {}, "of an earlier release"
