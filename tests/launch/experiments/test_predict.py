"""`zerolm predict`: which runs it fits, what it says of a target, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.__main__ import main
from launch.estimate.scaling import LossFit
from tests.launching import LLAMA, write_json, write_shards
from zerolm.model.model import Model
from zerolm.shards.reader import open_source

LAW = LossFit("of the test", 1.5, 60.0, 200.0, 0.4, 0.4)
WIDTHS, TOKENS = (16, 32, 64), (1_000_000, 4_000_000, 16_000_000)


def model_config(width: int) -> dict[str, Any]:
    return LLAMA | {"hidden_size": width, "intermediate_size": 2 * width}


@pytest.fixture(scope="module")
def sizes(tmp_path_factory) -> dict[int, int]:
    directory = tmp_path_factory.mktemp("models")
    return {
        width: Model.load(
            str(write_json(directory / f"{width}.json", model_config(width)))
        ).num_parameters
        for width in (*WIDTHS, 128)
    }


def write_run(run_dir: Path, width: int, tokens: int, loss: float, **settings: Any) -> Path:
    run_dir.mkdir(parents=True)
    defaults = {"schedule": "cosine", "learning_rate": 1e-3, "min_learning_rate": 1e-4}
    defaults |= {"val_data": ["shards/val"], "total_tokens": tokens}
    record = {"settings": defaults | settings, "model_config": model_config(width)}
    write_json(run_dir / "run.json", record | {"data_fingerprint": "abc"})
    row = {"step": 10, "tokens": tokens, "train/loss": 9.0, "eval/loss": loss}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    event = {"event": settings.get("ended", "done"), "step": 10, "tokens": tokens}
    event["time"] = "2026-01-01T00:00:00+0000"
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    return run_dir


@pytest.fixture
def ladder(tmp_path, sizes) -> Path:
    """A directory of nine runs with the losses of a law."""
    for width in WIDTHS:
        for tokens in TOKENS:
            loss = LAW.loss(sizes[width], tokens)
            write_run(tmp_path / "ladder" / f"{width}-{tokens}", width, tokens, loss)
    return tmp_path / "ladder"


def predict(capsys, *words: object) -> dict[str, Any]:
    assert main(["predict", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys, *words: object) -> str:
    assert main(["predict", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_the_law_of_the_runs_predicts_a_larger_one(ladder, sizes, tmp_path, capsys):
    target = write_json(tmp_path / "large.json", model_config(128))
    words = (ladder, "--model_config", target, "--total_tokens", "32M")
    found = predict(capsys, *words)
    assert found["law"]["alpha"] == pytest.approx(0.4, rel=1e-3)
    predictions = found["target"]["predictions"]
    assert predictions["total"]["loss"] == pytest.approx(LAW.loss(sizes[128], 32e6), rel=1e-4)
    assert predictions["non_embedding"]["loss"] != predictions["total"]["loss"]
    beyond = found["target"]["beyond"]
    assert beyond["tokens"] == 2 and beyond["parameters"] == pytest.approx(sizes[128] / sizes[64])
    assert main(["predict", *map(str, words)]) == 0
    text = capsys.readouterr().out
    assert "80% interval" in text and "2 x in tokens outside the range of the runs" in text


def test_a_finished_run_is_compared_with_its_prediction(ladder, sizes, tmp_path, capsys):
    loss = LAW.loss(sizes[128], 32_000_000)
    target = write_run(ladder / "target", 128, 32_000_000, loss * 1.1)
    found = predict(capsys, ladder, "--check_against", target)
    assert len(found["runs"]) == 9 and found["target"]["measured"] == loss * 1.1
    assert main(["predict", str(ladder), "--check_against", str(target)]) == 0
    text = capsys.readouterr().out
    assert "(-9.09%) off, and the loss is outside the interval" in text


def test_the_best_shape_of_a_budget_is_that_of_the_law(ladder, capsys):
    flops = 6 * 64_000 * 16e6
    found = predict(capsys, ladder, "--budget", f"{flops:g}")["budget"]
    assert found["parameters"] == pytest.approx(LAW.optimum(flops)[0], rel=1e-2)
    assert 6 * found["parameters"] * found["tokens"] == pytest.approx(flops)


def test_runs_that_are_not_at_the_end_of_a_decay_are_left_out(ladder, sizes, capsys):
    write_run(ladder / "trunk", 32, 8_000_000, 2.0, schedule="constant", min_learning_rate=None)
    write_run(ladder / "high", 32, 8_000_000, 2.0, min_learning_rate=9e-4)
    write_run(ladder / "early", 32, 8_000_000, 2.0, ended="stopped")
    write_run(ladder / "tuned", 32, 8_000_000, 2.0, init_from="models/base")
    write_run(ladder / "worse", 32, 4_000_000, LAW.loss(sizes[32], 4_000_000) + 0.1, seed=1)
    skipped = write_run(ladder / "skipped", 32, 8_000_000, 2.0) / "metrics.jsonl"
    skipped.write_text(skipped.read_text() + '{"step": 11, "tokens": 9000000, "train/loss": 9.0}\n')
    found = predict(capsys, ladder)
    assert found["law"]["alpha"] == pytest.approx(0.4, rel=1e-3)
    reasons = found["left_out"]
    assert reasons["skipped"] == "its last step was not evaluated"
    assert reasons["trunk"] == "its learning rate does not decay"
    assert reasons["high"] == "its learning rate only decays from 0.001 to 0.0009"
    assert reasons["early"] == "it is stopped, not done"
    assert reasons["tuned"] == "it starts from existing weights"
    assert reasons["worse"].endswith("has the same size and tokens, and a lower loss")


def test_far_targets_are_refused_until_the_user_says_how_far(ladder, tmp_path, capsys):
    target = write_json(tmp_path / "large.json", model_config(64))
    words = (ladder, "--model_config", target, "--total_tokens", "480M")
    errors = refusal(capsys, *words)
    assert "30 x in tokens" in errors and "--max_extrapolation 30" in errors
    assert predict(capsys, *words, "--max_extrapolation", 30)["target"]["beyond"]["tokens"] == 30
    assert "--budget: 1e+18 FLOPs are" in refusal(capsys, ladder, "--budget", "1e18")


def test_runs_that_cannot_be_compared_or_are_too_few_are_refused(ladder, tmp_path, capsys):
    few = [ladder / f"{width}-{TOKENS[0]}" for width in WIDTHS]
    assert "3 can be fitted, with 3 sizes and 1 numbers of tokens" in refusal(capsys, *few)
    write_run(tmp_path / "other", 32, 2_000_000, 2.0, val_data=["shards/other"])
    errors = refusal(capsys, ladder, tmp_path / "other", tmp_path / "nothing")
    assert "have different validation data" in errors and "nothing: has no run.json" in errors


def test_one_ratio_of_tokens_to_parameters_says_nothing_of_another(tmp_path, capsys):
    for number, width in enumerate((16, 24, 32, 48, 64, 96)):
        tokens = 20 * Model.load(
            str(write_json(tmp_path / "m.json", model_config(width)))
        ).num_parameters  # fmt: skip
        write_run(tmp_path / "ladder" / str(number), width, tokens, 6.0 - number / 4)
    errors = refusal(
        capsys, tmp_path / "ladder", "--model_config", tmp_path / "m.json", "--total_tokens", "1M",
    )  # fmt: skip
    assert "all have about the same tokens per parameter" in errors
    assert "same tokens per parameter" in refusal(capsys, tmp_path / "ladder", "--budget", "1e12")


def test_runs_that_size_does_not_help_are_said_to_be_no_evidence(tmp_path, sizes, capsys):
    for width in WIDTHS:
        for tokens in TOKENS:
            loss = 1.5 + 200 / tokens**0.4 + width / 1e3
            write_run(tmp_path / f"{width}-{tokens}", width, tokens, loss)
    assert "Do not trust" in predict(capsys, tmp_path)["notices"][0]


def change(run_dir: Path, **parts: dict[str, Any]) -> None:
    """Replace keys of the blocks of a run.json, or blocks."""
    record = json.loads((run_dir / "run.json").read_text())
    for name, part in parts.items():
        record[name] = record.get(name, {}) | part if isinstance(part, dict) else part
    write_json(run_dir / "run.json", record)


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("seq_len", {"settings": {"seq_len": 512}}),
        ("eval_tokens", {"settings": {"eval_tokens": 10_000}}),
        ("document_mask", {"settings": {"document_mask": True}}),
        ("packing", {"settings": {"packing": "best_fit"}}),
        ("vocab_size", {"model_config": {"vocab_size": 50_304}}),
        ("validation data", {"settings": {"val_data": ["shards/val", "shards/more"]}}),
    ],
    ids=str,
)
def test_runs_whose_losses_mean_another_thing_are_refused(ladder, capsys, what, parts):
    change(ladder / "32-4000000", **parts)
    errors = refusal(capsys, ladder)
    assert f"have different {what}" in errors and "32-4000000" in errors
    assert "Their" not in errors


def test_a_target_whose_loss_means_another_thing_is_refused(ladder, sizes, tmp_path, capsys):
    run = write_run(tmp_path / "target", 128, 32_000_000, 2.0, seq_len=512)
    assert "different seq_len" in refusal(capsys, ladder, "--check_against", run)
    config = write_json(tmp_path / "other.json", model_config(64) | {"vocab_size": 50_304})
    errors = refusal(capsys, ladder, "--model_config", config, "--total_tokens", "32M")
    assert "vocab_size: 50304, but the runs have" in errors


def test_the_same_validation_data_is_accepted_under_every_name(ladder, tmp_path, capsys):
    names = ["shards/val", "./shards/val", "shards/../shards/val/", "shards//val"]
    for run_dir, name in zip(sorted(ladder.iterdir()), names, strict=False):
        change(run_dir, settings={"val_data": [name]})
    assert len(predict(capsys, ladder)["runs"]) == 9
    write_shards(tmp_path / "val")
    (tmp_path / "link").symlink_to(tmp_path / "val")
    for number, run_dir in enumerate(sorted(ladder.iterdir())):
        change(run_dir, settings={"val_data": [str(tmp_path / ("link" if number else "val"))]})
    assert len(predict(capsys, ladder)["runs"]) == 9


def test_the_recorded_fingerprints_decide_and_not_the_names(ladder, capsys):
    for number, run_dir in enumerate(sorted(ladder.iterdir())):
        change(run_dir, val_fingerprints=["a" * 64], settings={"val_data": [f"copy-{number}"]})
    assert len(predict(capsys, ladder)["runs"]) == 9
    change(ladder / "32-4000000", val_fingerprints=["b" * 64], settings={"val_data": ["copy-1"]})
    assert "have different validation data" in refusal(capsys, ladder)


def test_fingerprints_of_old_runs_are_computed_where_they_were_started(ladder, tmp_path, capsys):
    write_shards(tmp_path / "project" / "val")
    fingerprint = open_source(tmp_path / "project" / "val").fingerprint
    old = {"working_directory": str(tmp_path / "project"), "settings": {"val_data": ["val"]}}
    for run_dir in ladder.iterdir():
        change(run_dir, val_fingerprints=[fingerprint], settings={"val_data": ["of/another/disk"]})
    record = ladder / "32-4000000" / "run.json"
    change(record.parent, **old)
    content = json.loads(record.read_text())
    del content["val_fingerprints"]
    record.write_text(json.dumps(content))
    assert len(predict(capsys, ladder)["runs"]) == 9
    change(record.parent, working_directory=str(tmp_path))
    assert "Give runs with the same validation data." in refusal(capsys, ladder)


def test_deepspeeds_schedulers_count_by_whether_they_decay(ladder, capsys):
    def scheduled(run_dir: Path, kind: str, rates: list[float] | None = None) -> None:
        change(run_dir, ds_config={"scheduler": {"type": kind, "params": {}}})
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
        steps = range(11 - len(rates or ()), 11)
        rows = [{"step": step, "tokens": 1, "train/learning_rate": rate}
                for step, rate in zip(steps, rates or [], strict=True)] + rows  # fmt: skip
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    scheduled(ladder / "16-1000000", "WarmupLR")
    scheduled(ladder / "16-4000000", "WarmupDecayLR")
    scheduled(ladder / "32-1000000", "WarmupDecayLR", [1e-3, 9e-4])  # total_num_steps too large
    found = predict(capsys, ladder)
    assert found["left_out"] == {
        "16-1000000": "the WarmupLR in its DeepSpeed JSON does not decay",
        "32-1000000": "its learning rate only decays from 0.001 to 0.0009",
    }


def test_losses_and_runs_that_no_law_has_are_left_out_with_the_reason(ladder, tmp_path, capsys):
    def lost(name: str, loss: float) -> None:
        write_run(ladder / name, 32, 8_000_000, loss)

    lost("zero", 0.0)
    lost("negative", -1.0)
    lost("nan", float("nan"))
    lost("infinite", float("inf"))
    change(write_run(ladder / "odd", 32, 8_000_000, 2.0), model_config={"model_type": "no_such"})
    none = write_run(ladder / "none", 32, 8_000_000, 2.0)
    write_json(
        none / "run.json", json.loads((none / "run.json").read_text()) | {"model_config": {}}
    )
    changed = write_run(ladder / "changed", 32, 8_000_000, 2.0) / "events.jsonl"
    event = {"event": "changed", "step": 3, "time": "2025-12-31T00:00:00+0000"}
    event["changes"] = {"settings.learning_rate": [1e-3, 1e-4]}
    changed.write_text(json.dumps(event) + "\n" + changed.read_text())
    reasons = predict(capsys, ladder, ladder / "zero", f"{ladder}/./16-1000000")["left_out"]
    assert reasons["zero"] == "its final loss is 0, but a scaling law needs positive losses"
    assert reasons["negative"].startswith("its final loss is -1")
    assert reasons["nan"] == reasons["infinite"] == "its last loss is not finite"
    assert reasons["odd"].startswith("its model_config cannot be read")
    assert reasons["none"] == "its run.json has no model_config"
    assert reasons["changed"] == "it was resumed with different values of settings.learning_rate"
    assert len(reasons) == 7


def test_runs_of_one_name_in_two_directories_are_told_apart(ladder, tmp_path, sizes, capsys):
    other = write_run(tmp_path / "more" / "16-1000000", 16, 2_000_000, 0.0)
    assert list(predict(capsys, ladder, other)["left_out"]) == [str(other)]


def test_what_changes_the_law_is_noted(ladder, capsys):
    change(ladder / "32-4000000", data_fingerprint="def", ds_config={"optimizer": {"type": "Lion"}})
    notices = predict(capsys, ladder)["notices"]
    assert [each for each in notices if "training data" in each]
    assert [each for each in notices if "optimizers" in each]


def test_one_ratio_of_tokens_to_parameters_is_trusted_at_that_ratio(tmp_path, capsys):
    config = write_json(tmp_path / "m.json", model_config(160))
    for number, width in enumerate((16, 24, 32, 48, 64, 96)):
        size = Model.load(str(write_json(tmp_path / "w.json", model_config(width)))).num_parameters
        write_run(tmp_path / "ladder" / str(number), width, 20 * size, 20 * size**-0.15)
    tokens = 20 * Model.load(str(config)).num_parameters
    words = (tmp_path / "ladder", "--model_config", config, "--total_tokens", tokens)
    found = predict(capsys, *words)
    assert found["one_ratio"] and not found["notices"]
    predicted = found["target"]["predictions"]["total"]["loss"]
    assert predicted == pytest.approx(20 * (tokens / 20) ** -0.15, rel=1e-3)
