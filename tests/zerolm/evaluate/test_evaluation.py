"""Every problem with evaluations and samples is reported before a run starts."""

import json
import shutil

import pytest

from tests.core_bundle import write_bundle
from tests.launching import LLAMA, write_json
from tests.texts import VOCABULARY, write_items, write_task, write_text_shards, write_tokenizer
from zerolm.common.errors import ConfigError
from zerolm.evaluate import lm_eval
from zerolm.preflight import check as preflight


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("rules")
    write_text_shards(base / "shards", write_tokenizer(base / "tokenizer"))
    write_json(base / "model.json", LLAMA | {"vocab_size": VOCABULARY})
    write_json(base / "ds.json", {"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}})
    write_items(base / "items.jsonl", 20)
    (base / "prompts.txt").write_text("The class statement\n")
    write_task(base / "tasks", base / "items.jsonl")
    return base


def check(base, *words):
    required = ["--data", base / "shards", "--model_config", base / "model.json"]
    required += ["--deepspeed_config", base / "ds.json", "--run_dir", base / "run"]
    required += ["--seq_len", 48, "--batch_tokens", 384, "--total_tokens", 3840]
    return preflight.check([str(word) for word in [*required, *words]], {})


def refused(base, *words) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(base, *words)
    assert not (base / "run").exists()
    return caught.value.problems


def test_valid_evaluations_are_in_the_plan(base) -> None:
    plan = check(
        base, "--hellaswag", base / "items.jsonl", "--hellaswag_items", 5, "--eval_tasks",
        "local_hellaswag", "--eval_task_path", base / "tasks", "--prompts", base / "prompts.txt",
        "--downstream_interval", 3, "--sample_length", 30,
    )  # fmt: skip
    assert plan.derived["downstream"] == "HellaSwag (5 items), local_hellaswag every 3 steps"
    assert "each doubling" in plan.derived["samples"]


def test_a_missing_tokenizer_costs_only_the_bits_per_byte_and_a_notice(base, tmp_path) -> None:
    plan = check(base)
    assert plan.token_bytes is not None and len(plan.token_bytes.counts) == VOCABULARY
    assert not any("bits per byte" in notice for notice in plan.notices)
    without = shutil.copytree(base, tmp_path / "base")
    shutil.rmtree(without / "shards" / "tokenizer")
    plan = check(without)
    (notice,) = (notice for notice in plan.notices if "bits per byte" in notice)
    assert plan.token_bytes is None and notice.startswith("no bits per byte: ")
    assert "tokenizer.json: no such file" in notice


def test_core_is_in_the_plan_and_a_damaged_bundle_is_refused(base, tmp_path) -> None:
    bundle = write_bundle(tmp_path / "bundle", 6)
    plan = check(base, "--core", bundle, "--core_items", 5, "--downstream_interval", 2)
    assert plan.derived["downstream"] == "CORE (5 items per task) every 2 steps"
    (bundle / "eval_data" / "schema.jsonl").unlink()
    (problem,) = refused(base, "--core", bundle)
    assert problem.startswith("command line: --core: ") and "schema.jsonl" in problem


def test_all_problems_are_reported_at_once(base, tmp_path, monkeypatch) -> None:
    own_tasks = lm_eval._manager(
        str(base / "tasks"), include_defaults=False
    )  # the others take 20 s
    monkeypatch.setattr(lm_eval, "_manager", lambda *_, **__: own_tasks)
    (tmp_path / "items.jsonl").write_text('{"ctx_a": "x"}\n')
    problems = refused(
        base, "--hellaswag", tmp_path / "items.jsonl", "--eval_tasks", "local_hellaswog",
        "--eval_task_path", base / "tasks", "--prompts", base / "none.txt", "--top_p", 0,
    )  # fmt: skip
    assert len(problems) == 4
    for start, end in (
        ("command line: --hellaswag: ", "items.jsonl:1: has no activity_label"),
        ("command line: --eval_tasks: local_hellaswog: ", 'Did you mean "local_hellaswag"?'),
        ("command line: --prompts: ", "cannot be read"),
        ("command line: --top_p: 0 ", "must be above 0"),
    ):
        assert any(problem.startswith(start) and end in problem for problem in problems), start


def test_a_resumed_run_continues_without_missing_inputs(base, tmp_path) -> None:
    words = ["--prompts", base / "none.txt", "--hellaswag", base / "none.jsonl"]
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    plan = check(base, *words, "--run_dir", tmp_path / "run")
    without = [notice for notice in plan.notices if "the run resumes without" in notice]
    assert len(without) == 2 and "none.txt" in without[1], plan.notices
    with pytest.raises(ConfigError, match=r"--top_p: 0 must"):
        check(base, *words, "--run_dir", tmp_path / "run", "--top_p", 0)
    assert len(refused(base, *words)) == 2


def test_texts_longer_than_the_maximum_are_refused(base, tmp_path) -> None:
    item = json.loads((base / "items.jsonl").read_text().splitlines()[0])
    item["endings"][3] = "too long " * 40
    (tmp_path / "long.jsonl").write_text(json.dumps(item) + "\n")
    (problem,) = refused(base, "--hellaswag", tmp_path / "long.jsonl")
    assert "long.jsonl: item 1 has" in problem and "the maximum is 48" in problem
    (problem,) = refused(base, "--prompts", base / "prompts.txt", "--sample_length", 47)
    assert "prompt 1 has" in problem and "exceed 48, the smaller of --seq_len" in problem


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        (["--downstream_interval", 5], "--hellaswag or --core or --eval_tasks"),
        (["--eval_task_items", 5], "--eval_tasks"),
        (["--sample_interval", "5k"], "--prompts"),
        (["--temperature", 0.1], "--prompts"),
    ],
)
def test_a_setting_without_the_one_it_requires_is_refused(base, words, needs) -> None:
    (problem,) = refused(base, *words)
    assert f"needs {needs}. Add it" in problem


def test_shards_without_a_tokenizer_are_refused(base, corpus_without_tokenizer) -> None:
    words = ["--data", corpus_without_tokenizer, "--prompts", base / "prompts.txt"]
    required = ["--model_config", base / "model.json", "--deepspeed_config", base / "ds.json"]
    required += ["--run_dir", base / "run", "--seq_len", 32, "--batch_tokens", 256]
    with pytest.raises(ConfigError, match=r"--prompts: needs a tokenizer: .*tokenizer"):
        preflight.check([str(word) for word in words + required], {})


@pytest.fixture
def corpus_without_tokenizer(tmp_path):
    from tests.launching import write_shards

    return write_shards(tmp_path / "counting")
