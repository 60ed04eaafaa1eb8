"""HellaSwag, lm-eval's tasks and samples during training: correct, and without effect on it."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.core_bundle import write_bundle
from tests.end_to_end.recipe import BATCH, profile, recipe
from tests.end_to_end.test_expert_balance import MIXTRAL
from tests.launching import LLAMA, events, rows, run_ranks, write_json
from tests.texts import VOCABULARY, write_items, write_task, write_text_shards, write_tokenizer
from zerolm.__main__ import main
from zerolm.evaluate.exported_model import evaluate_export
from zerolm.parts.settings import RunSettings

pytestmark = pytest.mark.soak  # always: tests/zerolm/evaluate

STEPS, ITEMS, POSITIONS, NEW_TOKENS = 4, 40, 96, 12
CORE_ITEMS, TASK_ITEMS = 6, 15
SEQ_LEN = 64  # below POSITIONS: no text may have more tokens
STEP_TOKENS = BATCH * SEQ_LEN
PROMPTS = ("The class statement", "An exception is", "", "x = [1,")
GENERATING = """\
task: local_generation
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
output_type: generate_until
test_split: test
doc_to_text: "{{{{ctx_a}}}}"
doc_to_target: "{{{{label}}}}"
generation_kwargs:
  until: ["e"]
  max_gen_toks: 10
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
BROKEN = """\
task: broken
include: local_hellaswag.yaml
process_results: !function broken.process_results
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Return a directory with shards, a model config, items, prompts and tasks."""
    base = tmp_path_factory.mktemp("texts")
    write_text_shards(base / "shards", write_tokenizer(base / "tokenizer"))
    model = LLAMA | {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.1,  # with less, it predicts the same for every text
    }
    write_json(base / "model.json", model)
    own = {key: MIXTRAL[key] for key in ("model_type", "architectures")}
    write_json(base / "mixture.json", MIXTRAL | model | own)
    data = write_items(base / "items.jsonl", ITEMS)
    (base / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    write_task(base / "tasks", data)
    write_bundle(base / "bundle", 30)
    (base / "tasks" / "local_generation.yaml").write_text(GENERATING.format(path=data))
    (base / "tasks" / "broken.yaml").write_text(BROKEN)
    (base / "tasks" / "broken.py").write_text(
        "def process_results(doc, results):\n    raise RuntimeError('broken on purpose')\n"
    )
    return base


def train(
    texts: Path, run_dir: Path, stage: int, num_ranks: int, evaluated: bool,
    form: dict | None = None, interval: int = 1, model: str = "model", flags: tuple = (),
    **more: str,
):  # fmt: skip
    """Train four steps, with evaluations after every `interval` and a profile, or with neither.

    The tasks of lm-eval run with ZeRO-3 only.

    Args:
        form: additional keys of the DeepSpeed config: a form of parallelism.
        model: name of the model's config in `texts`.
        flags: further flags of pretrain.py.
    """
    json_file = profile(run_dir.with_suffix(".json"), stage, bf16=False)
    write_json(json_file, {**json.loads(json_file.read_text()), **(form or {})})
    config = texts / f"{model}.json"
    flags = [*recipe(config, texts / "shards", run_dir, json_file, STEPS, micro=2), *flags]
    flags += ["--wandb", "off", "--checkpoint_interval", 2, "--seq_len", SEQ_LEN]
    flags += ["--batch_tokens", STEP_TOKENS, "--total_tokens", STEPS * STEP_TOKENS]
    if evaluated:
        flags += [
            "--hellaswag", texts / "items.jsonl", "--downstream_interval", interval,
            "--prompts", texts / "prompts.jsonl", "--sample_interval", interval * STEP_TOKENS,
            "--core", texts / "bundle", "--core_items", CORE_ITEMS,
            "--sample_length", NEW_TOKENS, "--temperature", 0 if stage == 3 else 0.9,
            "--profile", "2:3",
        ]  # fmt: skip
    if evaluated and stage == 3:
        flags += ["--eval_tasks", "broken,local_hellaswag", "--eval_tasks", "local_generation"]
        flags += ["--eval_task_path", texts / "tasks", "--eval_task_items", TASK_ITEMS]
    return run_ranks(num_ranks, *flags, **more)


def samples(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def outcomes(run_dir: Path) -> dict:
    return json.loads((run_dir / "hellaswag.json").read_text())


def evaluate_with_lm_eval(texts: Path, run_dir: Path, names: tuple[str, ...]):
    """Export the last checkpoint, and evaluate it with lm-eval's own model class."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    exported = run_dir.with_name(f"{run_dir.name}-exported")
    assert main(["export", str(run_dir), str(exported), "--precision", "fp32"]) == 0
    tasks = TaskManager(include_path=str(texts / "tasks"), include_defaults=False)
    tasks = tasks.load(list(names))
    theirs = HFLM(
        pretrained=str(exported), batch_size=8, device="cpu", dtype="float32", max_length=SEQ_LEN
    )
    return exported, lm_eval.evaluate(lm=theirs, task_dict=tasks, bootstrap_iters=0)


def assert_equal_to_lm_eval(run_dir: Path, found) -> float:
    """Compare the last HellaSwag result of a run, by item; return the largest difference."""
    theirs = sorted(found["samples"]["local_hellaswag"], key=lambda sample: sample["doc_id"])
    ours = outcomes(run_dir)
    assert len(theirs) == len(ours["outcomes"]) == ITEMS == ours["items"]
    worst = 0.0
    for sample, outcome in zip(theirs, ours["outcomes"], strict=True):
        likelihoods = [likelihood for likelihood, _ in sample["filtered_resps"]]
        assert outcome["log_likelihoods"] == pytest.approx(likelihoods, abs=1e-4)
        pairs = zip(outcome["log_likelihoods"], likelihoods, strict=True)
        worst = max(worst, *(abs(ours - theirs) for ours, theirs in pairs))
        assert sample["acc"] == (outcome["prediction"] == outcome["label"])
        assert sample["acc_norm"] == (outcome["prediction_norm"] == outcome["label"])
    results = found["results"]["local_hellaswag"]
    assert rows(run_dir, "eval/hellaswag/acc")[STEPS] == pytest.approx(results["acc,none"])
    assert rows(run_dir, "eval/hellaswag/acc_norm")[STEPS] == pytest.approx(
        results["acc_norm,none"]
    )
    return worst


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluations_are_correct_and_do_not_change_training(tmp_path, texts, stage, capfd) -> None:
    plain, run_dir = tmp_path / "plain", tmp_path / "evaluated"
    done = train(texts, plain, stage, 2, evaluated=False)
    assert done.returncode == 0, done.stdout[-4000:]
    done = train(texts, run_dir, stage, 2, evaluated=True, interval=2)
    assert done.returncode == 0, done.stdout[-4000:]
    for key in ("train/loss", "train/grad_norm", "train/param_norm"):
        assert len(rows(plain, key)) == STEPS and rows(run_dir, key) == rows(plain, key), key
    assert set(rows(run_dir, "eval/hellaswag/acc")) == {2, STEPS}
    written = samples(run_dir)
    asked = [(step, number) for step in (2, STEPS) for number in range(len(PROMPTS))]
    assert [(each["step"], each["prompt_number"]) for each in written] == asked
    assert [each["prompt"] for each in written[: len(PROMPTS)]] == list(PROMPTS)
    assert 'sample=0 prompt="The class statement" text=' in done.stdout
    for step, rank in ((2, 0), (2, 1), (3, 0), (3, 1)):
        trace = run_dir / "profile" / f"step-{step:08d}-rank-{rank:05d}.trace.json.gz"
        entries = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        labels = {entry.get("name") for entry in entries if entry.get("cat") == "user_annotation"}
        assert labels >= {f"step {step}", "data", "forward", "backward", "optimizer step"}, labels
    assert [each["step"] for each in events(run_dir) if each["event"] == "profile"] == [2, 3]
    if stage == 2:
        return
    exported, found = evaluate_with_lm_eval(texts, run_dir, ("local_hellaswag", "local_generation"))
    assert_equal_to_lm_eval(run_dir, found)
    first = outcomes(run_dir)["outcomes"][:TASK_ITEMS]
    expected = sum(each["prediction"] == each["label"] for each in first) / TASK_ITEMS
    assert rows(run_dir, "eval/local_hellaswag/acc")[STEPS] == pytest.approx(expected)
    generated = found["results"]["local_generation"]["exact_match,none"]
    assert rows(run_dir, "eval/local_generation/exact_match")[STEPS] == pytest.approx(generated)

    config = json.loads((exported / "config.json").read_text())
    write_json(exported / "config.json", config | {"max_position_embeddings": SEQ_LEN})
    settings = RunSettings(core=str(texts / "bundle"), core_items=CORE_ITEMS)
    expected = evaluate_export(exported, settings)
    saved = json.loads((run_dir / "core.json").read_text())
    assert saved["tasks"] == expected["core"] and saved["step"] == STEPS
    assert rows(run_dir, "eval/core")[STEPS] == saved["core"] == expected["figures"]["core"]

    failed = [each for each in events(run_dir) if each["event"] == "evaluation_failed"]
    assert [each["step"] for each in failed] == [2, STEPS]
    assert all(each["evaluation"] == "broken" for each in failed)
    assert all("broken on purpose" in each["error"] for each in failed)

    # With greedy sampling, transformers generates the same text.
    last = written[-len(PROMPTS) :]
    assert [each["text"] for each in last] == greedy(exported)
    # `generate` loads the checkpoint and the export, and prints it, too.
    flags = ["--prompt", PROMPTS[0], "--temperature", "0", "--sample_length", str(NEW_TOKENS)]
    for model in (run_dir, exported):
        capfd.readouterr()
        assert main(["generate", str(model), *flags]) == 0
        printed = capfd.readouterr()
        assert printed.out == PROMPTS[0] + last[0]["text"] + "\n"
        assert str(model) in printed.err


def greedy(exported: Path) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype="float32").eval()
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[
            0, inputs["input_ids"].shape[1] :
        ]
        texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    return texts


def test_hellaswag_is_the_same_on_every_profile(tmp_path, texts) -> None:
    found = {}
    for stage, num_ranks in ((2, 1), (2, 2), (3, 1), (3, 2)):
        run_dir = tmp_path / f"zero{stage}-{num_ranks}"
        done = train(texts, run_dir, stage, num_ranks, evaluated=True)
        assert done.returncode == 0, done.stdout[-4000:]
        worst = assert_equal_to_lm_eval(
            run_dir, evaluate_with_lm_eval(texts, run_dir, ("local_hellaswag",))[1]
        )
        found[stage, num_ranks] = outcomes(run_dir)
        acc, acc_norm = (found[stage, num_ranks][key] for key in ("acc", "acc_norm"))
        print(f"ZeRO-{stage}, {num_ranks} rank(s): {acc=} {acc_norm=}, {worst:.2e} from lm-eval")
    first = found.pop((2, 1))
    for profile_, other in found.items():
        worst = 0.0
        for one, two in zip(first["outcomes"], other["outcomes"], strict=True):
            pairs = zip(one["log_likelihoods"], two["log_likelihoods"], strict=True)
            worst = max(worst, *(abs(ours - theirs) for ours, theirs in pairs))
            for key in ("prediction", "prediction_norm", "label"):
                assert two[key] == one[key], profile_
        print(f"ZeRO-{profile_[0]}, {profile_[1]} rank(s): {worst:.2e} from ZeRO-2 on one")
        assert worst < 1e-3


@pytest.mark.parametrize(("ranks", "stage"), [(2, 2), (4, 1)])
def test_evaluations_with_divided_experts_equal_those_with_whole_ones(
    tmp_path, texts, ranks, stage
) -> None:
    """HellaSwag by item, CORE and samples, of which some ranks have one more than others."""
    found = {}
    for name, flags in (("whole", ()), ("divided", ("--expert_parallel", 2))):
        run_dir = tmp_path / name
        done = train(texts, run_dir, stage, ranks, evaluated=True, model="mixture", flags=flags)
        assert done.returncode == 0, done.stdout[-4000:]
        keys = ("train/loss", "eval/hellaswag/acc", "eval/hellaswag/acc_norm", "eval/core")
        figures = [rows(run_dir, key) for key in keys]
        assert set(figures[1]) == set(range(1, STEPS + 1))
        found[name] = figures, outcomes(run_dir)["outcomes"], samples(run_dir)
    (figures, ours, written), (expected, theirs, other) = found["divided"], found["whole"]
    assert figures[1:] == expected[1:] and written == other
    np.testing.assert_allclose([*figures[0].values()], [*expected[0].values()], rtol=1e-6)
    for one, two in zip(ours, theirs, strict=True):
        assert one["prediction"] == two["prediction"]
        np.testing.assert_allclose(one["log_likelihoods"], two["log_likelihoods"], atol=1e-3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_evaluations_in_pipeline_stages_equal_those_of_a_whole_model(
    tmp_path, texts, ranks
) -> None:
    """HellaSwag by item, CORE, lm-eval's tasks and samples; on two replicas and on one."""
    tasks = ("--eval_tasks", "local_hellaswag,local_generation", "--eval_task_path")
    tasks += (texts / "tasks", "--eval_task_items", TASK_ITEMS)
    found = {}
    for name, form in (("whole", None), ("divided", {"pipeline": {"stages": 2}})):
        run_dir = tmp_path / name
        done = train(texts, run_dir, 1, ranks, evaluated=True, form=form, interval=2, flags=tasks)
        assert done.returncode == 0, done.stdout[-4000:]
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        keys = sorted({key for line in lines for key in json.loads(line) if key[:5] == "eval/"})
        figures = {key: rows(run_dir, key) for key in keys}
        assert "eval/local_generation/exact_match" in figures and "eval/core" in figures
        found[name] = outcomes(run_dir)["outcomes"], figures, samples(run_dir)
    (ours, figures, written), (theirs, *expected) = found["divided"], found["whole"]
    assert [figures, written] == expected
    for one, two in zip(ours, theirs, strict=True):
        assert one["prediction"] == two["prediction"]
        np.testing.assert_allclose(one["log_likelihoods"], two["log_likelihoods"], atol=1e-3)


@pytest.mark.parametrize("stage", [2, 3])
def test_sequence_parallel_evaluations_equal_those_without(tmp_path, texts, stage) -> None:
    """HellaSwag by item, lm-eval's tasks and samples."""
    found = {}
    for name, form in (("plain", None), ("parallel", {"sequence_parallel_size": 2})):
        run_dir = tmp_path / name
        done = train(texts, run_dir, stage, 2, evaluated=True, form=form)
        assert done.returncode == 0, done.stdout[-4000:]
        metrics = (run_dir / "metrics.jsonl").read_text().splitlines()
        keys = sorted({key for line in metrics for key in json.loads(line) if key[:5] == "eval/"})
        figures = {key: rows(run_dir, key) for key in keys}
        assert set(figures["eval/hellaswag/acc"]) == set(range(1, STEPS + 1))
        assert stage == 2 or "eval/local_generation/exact_match" in figures
        found[name] = outcomes(run_dir)["outcomes"], figures, samples(run_dir)
    (ours, figures, written), (theirs, *expected) = found["parallel"], found["plain"]
    assert [figures, written] == expected
    worst = 0.0
    for one, two in zip(ours, theirs, strict=True):
        pairs = zip(one["log_likelihoods"], two["log_likelihoods"], strict=True)
        worst = max(worst, *(abs(mine - other) for mine, other in pairs))
        assert one["prediction"] == two["prediction"]
    print(f"ZeRO-{stage}, sequence parallel: {worst:.2e} from the run without")
    assert worst < 1e-3


@pytest.mark.parametrize("stage", [2, 3])
def test_a_kill_before_or_during_an_evaluation_neither_loses_nor_repeats_results(
    tmp_path, texts, stage
) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    assert train(texts, uninterrupted, stage, 2, evaluated=True).returncode == 0
    # Once before it, and once during it: an evaluation that has started is tried once more.
    fault = {"FAULT": "evaluation.begin:1:2:kill,evaluation.measure:0:3:kill"}
    fault["FAULT_ONCE"] = str(tmp_path)
    for _ in range(2):
        assert train(texts, killed, stage, 2, evaluated=True, **fault).returncode != 0
    done = train(texts, killed, stage, 2, evaluated=True, **fault)
    assert done.returncode == 0, done.stdout[-4000:]
    assert sum(each["event"] == "resume" for each in events(killed)) == 2
    assert samples(killed) == samples(uninterrupted)
    for key in ("train/loss", "eval/hellaswag/acc", "eval/hellaswag/acc_norm", "eval/core"):
        assert rows(killed, key) == rows(uninterrupted, key), key
    assert outcomes(killed) == outcomes(uninterrupted)


def test_an_evaluation_that_crashes_a_run_is_retried_once(tmp_path, texts) -> None:
    run_dir, fault = tmp_path / "failing", {"FAULT": "evaluation.measure:1:2:raise"}
    ends = [train(texts, run_dir, 2, 2, evaluated=True, **fault) for _ in range(3)]
    assert [done.returncode == 0 for done in ends] == [False, False, True], ends[-1].stdout[-4000:]
    failed = [each for each in events(run_dir) if each["event"] == "evaluation_failed"]
    assert [(each["step"], each["evaluation"]) for each in failed] == [(2, "hellaswag")]
    assert failed[0]["error"] == (
        "the run crashed twice during evaluation of this step; skipping it"
    )
    assert set(rows(run_dir, "eval/hellaswag/acc")) == {1, 3, 4}
    assert {each["step"] for each in samples(run_dir)} == {1, 3, 4}


def test_a_run_continues_without_a_deleted_tokenizer_and_items(tmp_path, texts) -> None:
    base = shutil.copytree(texts, tmp_path / "texts")
    run_dir, fault = tmp_path / "run", {"FAULT": "step.begin:0:4:kill"}
    assert train(base, run_dir, 2, 2, evaluated=True, **fault).returncode != 0
    shutil.rmtree(base / "shards" / "tokenizer")
    (base / "items.jsonl").unlink()
    done = train(base, run_dir, 2, 2, evaluated=True)
    assert done.returncode == 0, done.stdout[-4000:]
    failed = [each for each in events(run_dir) if each["event"] == "evaluation_failed"]
    assert {each["evaluation"] for each in failed} == {"hellaswag", "core", "samples"}
    assert all("there is no tokenizer" in each["error"] for each in failed)


def test_a_slow_task_is_not_taken_for_a_hang(tmp_path, texts) -> None:
    base = shutil.copytree(texts, tmp_path / "texts")
    (base / "tasks" / "broken.py").write_text(
        "import time\n\ndef process_results(doc, results):\n"
        "    time.sleep(1)\n    return {'acc': 1}\n"
    )
    run_dir = tmp_path / "slow"
    flags = recipe(base / "model.json", base / "shards", run_dir,
                   profile(tmp_path / "ds.json", 3, bf16=False), 1, micro=2)  # fmt: skip
    flags += ["--seq_len", SEQ_LEN, "--batch_tokens", STEP_TOKENS, "--total_tokens", STEP_TOKENS]
    flags += ["--wandb", "off", "--eval_tasks", "broken", "--eval_task_path", base / "tasks"]
    flags += ["--eval_task_items", 30, "--hang_timeout", 12, "--downstream_interval", 1]
    done = run_ranks(2, *flags)
    assert done.returncode == 0, done.stdout[-4000:]
    assert rows(run_dir, "eval/broken/acc") == {1: 1.0}
